"""Triton kernels for the work between collectives, and the choice between them and PyTorch's.

Both give the same bits, kernels in fewer launches. Each kernel has a wrapper, which takes the
arguments of the PyTorch operation that it replaces. No file here is imported before its first use:
Triton comes only with torch's GPU wheels.
"""

from functools import cache

import torch.distributed as dist

from monta_megatron.common.rules import require
from monta_megatron.exchange.agreement import gather_objects


@cache
def kernel_problem(device: str) -> str:
    """Why Triton kernels cannot run on this type of device; "" if they can.

    Triton imports but cannot build a kernel without a C compiler or Python's headers, so a trivial
    one is built and run.
    """
    if device != "cuda":
        return f"rows are on {device}, not on a GPU"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    from monta_megatron.exchange.kernels.tiles import build_problem

    return build_problem()


def is_fused(choice: str, device: str) -> bool:
    """Whether `--moe-monta-kernels` selects Triton kernels on this type of device.

    Raises:
        UserError: the option requires them and they cannot run.
    """
    if choice == "torch":
        return False
    problem = kernel_problem(device)
    _check(choice, problem)
    return not problem


def agreed_kernels(choice: str, device: str, group: dist.ProcessGroup) -> tuple[str, str | None]:
    """Agree on the kernels of a group; a collective call.

    Args:
        choice: of `--moe-monta-kernels`, the same on all ranks.
        device: type of the ranks' devices.
        group: the ranks of an exchange.

    Returns:
        The choice, with "auto" resolved to "fused" or "torch" on GPUs; and a log line if some rank
        cannot run Triton kernels.

    Raises:
        UserError: the option requires them and some rank cannot run them.
    """
    if choice == "torch" or device != "cuda":
        return choice, None
    ranks = dist.get_process_group_ranks(group)
    problems = gather_objects(kernel_problem(device), group, "agreement on kernels")
    failed = {rank: problem for rank, problem in zip(ranks, problems, strict=True) if problem}
    if not failed:
        return "fused", None
    rank, problem = next(iter(failed.items()))
    _check(choice, f"{problem} (rank {rank})")
    which = ", ".join(map(str, failed))
    return "torch", f"PyTorch's operations run on all ranks, as on rank {which} {problem}"


def _check(choice: str, problem: str) -> None:
    rule = f"be auto or torch where {problem}"
    require(not problem or choice == "auto", "moe_monta_kernels", choice, rule)
