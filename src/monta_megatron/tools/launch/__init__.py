"""From one YAML to a running Megatron: arguments, run directory, start. No torch, no Megatron."""
