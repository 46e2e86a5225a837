"""Predicts the best chain and number of chunks from measured curves. No torch, no groups."""

# Those of `named_routing`, here because a command's help shows them and loads no numpy.
ROUTINGS = ("uniform", "skewed", "node-limited")
