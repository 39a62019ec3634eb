"""The two graphs (and the VAE's), authored node by node from config and tensor headers.

Authored, not traced: a graph takes milliseconds instead of half a minute, needs no weights, and
every initializer keeps its checkpoint name, which is what makes linking and refitting possible.
"""
