"""`monta compare`: the same training with several dispatchers, side by side."""
