"""Routing of tokens: expected counts, and draws at random that they agree with."""
