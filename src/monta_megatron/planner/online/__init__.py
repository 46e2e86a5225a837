"""Decisions of a training between iterations: chain policy, tuning, drift monitoring."""
