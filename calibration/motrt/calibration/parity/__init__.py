"""Parity: the same inputs through a bundle and through a reference, and what differs."""
