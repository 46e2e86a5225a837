"""Triton kernels for the work between collectives: the same bits in fewer launches.

Each file is one kernel with its wrapper, which takes the arguments of the PyTorch operation that it
stands for. Nothing here is imported unless it is used: Triton comes with torch's GPU wheels alone.
"""
