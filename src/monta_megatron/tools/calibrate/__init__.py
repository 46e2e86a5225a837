"""Measures the content of a cluster file: single collectives and copies, and pairs of them."""
