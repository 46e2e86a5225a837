"""Comparing tensors: a mismatch names its first coordinate and both values there."""

import torch
import torch.distributed as dist


def assert_equal(
    actual: torch.Tensor,
    expected: torch.Tensor,
    what: object,
    bound: float | torch.Tensor | None = None,
) -> None:
    """Check that `difference` sees none; the error says on which rank, where there are several."""
    mismatch = difference(actual, expected, bound)
    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    assert mismatch is None, f"{rank}{what}: {mismatch}"


def difference(
    actual: torch.Tensor, expected: torch.Tensor, bound: float | torch.Tensor | None = None
) -> str | None:
    """How two tensors differ; None if they do not. A NaN equals nothing.

    Args:
        bound: by how much values may differ, whatever their dtypes; without it shape, dtype and
            values are equal.
    """
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if bound is None:
        if actual.dtype != expected.dtype:
            return f"{actual.dtype}, expected {expected.dtype}"
        differs = actual != expected
    else:
        # Not "larger than", which no NaN is.
        differs = ~((actual.double() - expected.double()).abs() <= bound)
    if not differs.any():
        return None
    first = tuple(differs.nonzero()[0].tolist())
    most = (actual.double() - expected.double()).abs().max()
    return (
        f"{int(differs.sum())} of {differs.numel()} values differ by up to {most:.3g}, the first "
        f"at {list(first)}: {actual[first].item()}, expected {expected[first].item()}"
    )
