"""Model dimensions and Megatron arguments, from model files and from config.json."""
