"""Megatron on CPU ranks, and a cluster of network namespaces. No torch, so that launchers start."""

# Megatron's on CPU ranks: no Transformer Engine, no fused kernel, no processes that load data.
CPU_RANKS_ARGUMENTS: tuple[str, ...] = (
    *("--transformer-impl", "local"),
    *("--num-workers", "0"),
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
