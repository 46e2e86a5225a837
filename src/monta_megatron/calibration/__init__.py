"""Measures what a cluster file holds: single collectives and copies, and pairs of them."""
