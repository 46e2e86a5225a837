"""Triton kernels for the work between collectives: the same bits in fewer launches.

Each file is one kernel with its wrapper, which takes the arguments of the PyTorch operation that it
replaces. Nothing here is imported before its first use: Triton comes only with torch's GPU wheels.
"""
