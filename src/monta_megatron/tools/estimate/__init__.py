"""Is it worth it: an iteration by part, predicted, and held against published figures."""
