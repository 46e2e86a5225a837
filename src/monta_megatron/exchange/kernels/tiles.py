"""Tiles of kernels over rows: 16 bytes at a time, in a shape chosen by the size of a row.

A thread reads or writes one unit at once: 16 bytes of the narrowest values, if every row begins at
a multiple of that, else one value. Sizes and strides of rows are given in units, so the compiler
can rely on the alignment without a variant for each size.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

UNIT_BYTES = 16
WARPS = 4
# Before Triton 3.4 a variant takes other arguments than its kernel.
LAUNCHES_VARIANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
if LAUNCHES_VARIANTS and torch.version.hip is None:
    # Assertions in kernels hold, as in torch's own kernels; none is added for overflows.
    OPTIONS |= {"debug": True, "sanitize_overflow": False}
# Values of an expert list processed at a time.
LIST = tl.constexpr(16)


class Tile(NamedTuple):
    """Rows and units that one program of `WARPS` warps processes at a time.

    Attributes:
        rows: number of rows.
        units: units of each row.
    """

    rows: int
    units: int


# The first tile as wide as a row is used, or the last. To copy: 4 units per thread.
COPIED = (Tile(8, 64), Tile(4, 128), Tile(2, 256), Tile(1, 512))
# To sum: one row and 2 units per thread, as a unit takes up to 8 registers in fp32.
SUMMED = (Tile(1, 128), Tile(1, 256))


def kernel(*rows: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` with few variants, each of which takes seconds to compile.

    Args:
        rows: parameters that point to rows. Only their 16-byte alignment creates variants, not that
            of other tensors, nor values of `tl.int32`, which change with each micro-batch.
    """

    def decorate(function: Callable[..., None]) -> Any:
        parameters = inspect.signature(function).parameters.items()
        by_type = {
            kind: [name for name, parameter in parameters if parameter.annotation is kind]
            for kind in (tl.int32, tl.tensor)
        }
        return triton.jit(
            function,
            do_not_specialize=by_type[tl.int32],
            do_not_specialize_on_alignment=[x for x in by_type[tl.tensor] if x not in rows],
        )

    return decorate


class Launch:
    """Repeated launch of a kernel for different rows, without fused multiply-add.

    The first launch binds arguments and looks up the variant, which takes the host ten times as
    long as the rest. Later launches run it without Triton's checks, so they must have the same
    device, dtypes, alignment of rows, and None for the same arguments: the key under which a
    `Launch` is kept fixes these (`exchange.buffers._launches_of`, `routing._list_launch`).

    Args:
        kernel: the kernel.
        num_rows: rows of a program.
        num_blocks: programs per row, the second axis of the grid.
        shared: the last arguments, the same in every launch.
    """

    def __init__(self, kernel: Any, num_rows: int, num_blocks: int, *shared: Any) -> None:
        self.kernel = kernel
        self.shared = shared
        self._num_rows, self._num_blocks = num_rows, num_blocks
        self._variant: Any = None

    def __call__(self, num_rows: int, *args: Any) -> None:
        """Launch for `num_rows` rows, with the first arguments; no-op for 0 rows."""
        grid = blocks_of(num_rows, self._num_rows), self._num_blocks, 1
        if 0 in grid:
            return
        if self._variant is not None:
            self._variant[grid](*args, *self.shared)
            return
        variant = self.kernel[grid](*args, *self.shared, **OPTIONS)
        # The interpreter returns no variant.
        if LAUNCHES_VARIANTS:
            self._variant = variant


# Launches of one operation, by name; `exchange.buffers` says which operations share them.
Launches: TypeAlias = dict[str, Launch]


def blocks_of(number: int, size: int) -> int:
    """Number of blocks of `size`. Triton's own `cdiv` takes a microsecond."""
    return -(-number // size)


def values_per_unit(*rows: torch.Tensor | None) -> int:
    """Values in a unit of these rows, each [any number, H]; the first is not None."""
    assert rows[0] is not None, "there are rows"
    least, sizes = UNIT_BYTES, rows[0].shape[1]
    for tensor in rows:
        if tensor is not None:
            least = min(least, tensor.itemsize)
            # A power of two divides all numbers if it divides their bits.
            sizes |= tensor.stride(0)
    values = UNIT_BYTES // least
    return 1 if sizes % values else values


@cache
def tile_for(units: int, tiles: tuple[Tile, ...]) -> Tile:
    """Tile for rows of `units` units."""
    return next((tile for tile in tiles if units <= tile.units), tiles[-1])


def sum_type(dtype: torch.dtype) -> Any:
    """Type of sums: fp32, or fp64 for fp64 values."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def stride_of(tensor: torch.Tensor | None) -> int:
    """Values from one row to the next; 0 without rows."""
    return 0 if tensor is None else tensor.stride(0)


@triton.jit
def _write_one(into: tl.tensor) -> None:
    tl.store(into, 1)


def build_problem() -> str:
    """Why no kernel can be built and run on the current GPU; "" if a trivial one can."""
    try:
        number = torch.zeros(1, dtype=torch.int32, device="cuda")
        _write_one[(1,)](number)
        # Errors on the device surface at the synchronization.
        number.item()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and subprocesses raise anything
        (line, *_) = str(error).strip().splitlines() or [""]
        return f"Triton cannot build a kernel: {type(error).__name__}: {line}"
    return ""
