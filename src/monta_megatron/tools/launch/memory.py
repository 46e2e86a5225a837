"""What a run holds on a rank, from Megatron's arguments: the least that they allow."""

from monta_megatron.common.flags import DTYPE_BYTES, fraction
from monta_megatron.planner.models.training_memory import HeldState
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.iteration import num_micro_batches
from monta_megatron.tools.launch.run_config import RunLayout

FULLY_SHARDED = ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2")
ACTIVATIONS_OFFLOADED = ("cpu-offloading-num-layers", "fine-grained-activation-offloading")


def held_state(arguments: Arguments, layout: RunLayout) -> HeldState:
    """What the arguments keep on a rank; where they leave it open, the least.

    Args:
        arguments: Megatron's arguments.
        layout: nodes and parallel sizes.
    """

    def text(name: str, default: str) -> str:
        return str(arguments[name].value) if name in arguments else default

    def dtype_bytes(name: str) -> int:
        # The least, 1, is fp8's; a name that does not exist is Megatron's to refuse.
        return DTYPE_BYTES.get(text(name, "fp32"), 1)

    def number(name: str) -> int | None:
        return arguments[name].read(SIZE) if name in arguments else None

    # Step 1: weights, gradients and optimizer state of a parameter.
    low_precision = "bf16" in arguments or "fp16" in arguments
    weight = (1 if "fp8-param-gather" in arguments else 2) if low_precision else 4
    gradient = dtype_bytes("main-grads-dtype")
    sums_in_low_precision = "grad-reduce-in-bf16" in arguments or (
        "fp16" in arguments and "accumulate-allreduce-grads-in-fp32" not in arguments
    )
    if low_precision and sums_in_low_precision:
        gradient = 2
    optimizer: float = dtype_bytes("main-params-dtype") if low_precision else 0
    adam = text("optimizer", "adam") == "adam"
    if adam:
        optimizer += dtype_bytes("exp-avg-dtype") + dtype_bytes("exp-avg-sq-dtype")
    if "optimizer-cpu-offload" in arguments:
        part = arguments.get("optimizer-offload-fraction")
        optimizer *= 0 if part is None else 1 - part.read(fraction)

    # Step 2: which of them are sharded. Other optimizers than Adam shard their state by themselves.
    on_every_rank: float = weight + gradient
    sharded = optimizer
    if any(name in arguments for name in FULLY_SHARDED):
        on_every_rank, sharded = 0, on_every_rank + optimizer
    elif adam and "use-distributed-optimizer" not in arguments:
        on_every_rank, sharded = on_every_rank + optimizer, 0

    # Step 3: the inputs of layers.
    layers_per_input: int | None = 1
    if any(name in arguments for name in ACTIVATIONS_OFFLOADED):
        layers_per_input = None
    elif text("recompute-method", "") == "uniform":
        layers_per_input = number("recompute-num-layers") or 1
    return HeldState(
        bytes_per_parameter=on_every_rank,
        sharded_bytes_per_parameter=sharded,
        num_micro_batches=num_micro_batches(arguments, layout.parallel.dp),
        layers_per_input=layers_per_input,
        num_layers=number("num-layers"),
    )
