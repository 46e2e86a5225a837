"""Arguments of Megatron on CPU ranks. No torch, so that a launcher starts at once.

No Transformer Engine, no fused CUDA kernel, and no extra processes to load data.
"""

CPU_RANKS_ARGUMENTS: tuple[str, ...] = (
    *("--transformer-impl", "local"),
    *("--num-workers", "0"),
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
