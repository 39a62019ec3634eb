"""Cosmos-shaped checkpoints, built at test time from public classes with fixed seeds.

Nothing is imported here: ``configs``, ``tokenizer`` and ``names`` work without torch, and a test
that needs only those must not pay for it.
"""
