"""Predicts the best chain and number of chunks from measured curves. No torch, no groups."""
