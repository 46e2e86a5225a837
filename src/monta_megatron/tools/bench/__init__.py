"""`monta bench`: stock dispatchers and ours on the same data, checked first, timed side by side."""
