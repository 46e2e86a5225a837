"""Megatron on CPU ranks, and a cluster of network namespaces. No torch, so that launchers start."""
