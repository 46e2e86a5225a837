"""Files that a user begins with: a model, a cluster or a run, as commented YAML."""
