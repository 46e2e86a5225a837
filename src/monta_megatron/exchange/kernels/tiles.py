"""Tiles of kernels over rows: 16 bytes at a time, in a shape that follows from a row's size.

A unit is what a thread reads or writes at once: 16 bytes of the narrowest values, where every row
begins at a multiple of that, else one value. Sizes and strides of rows are passed in units, so that
the compiler knows of that multiple without a variant for each size.
"""

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

UNIT_BYTES = 16
WARPS = 4
# Earlier releases launch a variant with other arguments than its kernel.
LAUNCHES_VARIANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4)
# Values of an expert list that are worked on at a time.
LIST = tl.constexpr(16)


class Tile(NamedTuple):
    """Rows and units that one program of `WARPS` warps works on at a time.

    Attributes:
        rows: how many of them.
        units: of each of these rows.
    """

    rows: int
    units: int


# The first one that is as wide as a row is taken, or the last. Moved: 4 units for each thread.
MOVED = (Tile(8, 64), Tile(4, 128), Tile(2, 256), Tile(1, 512))
# Added up: one row and 2 units for each thread, as a unit takes up to 8 registers in fp32.
SUMMED = (Tile(1, 128), Tile(1, 256))


def kernel(*rows: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit`, with few variants: each takes seconds to compile.

    Args:
        rows: parameters that point to rows; whether those begin at a multiple of 16 bytes makes a
            variant. Where other tensors begin makes none, nor do the values of `tl.int32`, which
            change from micro-batch to micro-batch.
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
    """Launches a kernel again and again for other rows. No product is fused into a sum.

    Triton binds the arguments of the first launch and looks its variant up, which takes the host
    ten times as long as the rest. Those that follow have tensors of the same dtypes, alignment and
    strides.

    Args:
        kernel: what is launched.
        num_rows: rows that a program works on.
        num_blocks: programs for each of these, as the second axis of the grid.
        shared: the last arguments, which are the same in every launch.
    """

    def __init__(self, kernel: Any, num_rows: int, num_blocks: int, *shared: Any) -> None:
        self.kernel = kernel
        self.shared = shared
        self._num_rows, self._num_blocks = num_rows, num_blocks
        self._variant: Any = None

    def __call__(self, num_rows: int, *args: Any) -> None:
        """Launch for so many rows, with the first arguments; nothing where there are none."""
        grid = -(-num_rows // self._num_rows), self._num_blocks, 1
        if 0 in grid:
            return
        if self._variant is not None:
            self._variant[grid](*args, *self.shared)
            return
        variant = self.kernel[grid](*args, *self.shared, num_warps=WARPS, enable_fp_fusion=False)
        # The interpreter returns none.
        if LAUNCHES_VARIANTS:
            self._variant = variant


# Of one operation; by what its kernels are told besides the columns.
Launches: TypeAlias = dict[Hashable, Launch]


def blocks_of(number: int, size: int) -> int:
    """Number of blocks of a size. Triton's own function takes a microsecond."""
    return -(-number // size)


def values_per_unit(*rows: torch.Tensor | None) -> int:
    """Values in a unit of these rows, all [any number, H]; the first are no `None`."""
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
    """The tile for rows of so many units."""
    return next((tile for tile in tiles if units <= tile.units), tiles[-1])


def sum_type(dtype: torch.dtype) -> Any:
    """The type in which values are added: fp32, or fp64 if theirs is."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def stride_of(tensor: torch.Tensor | None) -> int:
    """Values from one row to the next; 0 without rows."""
    return 0 if tensor is None else tensor.stride(0)


@triton.jit
def move_rows(
    rows: tl.tensor,
    stride: tl.int32,
    source: tl.tensor,
    into: tl.tensor,
    into_stride: tl.int32,
    target: tl.tensor,
    present: tl.tensor,
    num_units: tl.int32,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """into[target] = rows[source] for a tile of rows: one block of units, `program_id(1)`."""
    value = tl.program_id(1) * UNITS * UNIT + tl.arange(0, UNITS * UNIT)[None, :]
    mask = present[:, None] & (value < num_units * UNIT)
    values = tl.load(rows + source[:, None] * (stride * UNIT) + value, mask)
    tl.store(into + target[:, None] * (into_stride * UNIT) + value, values, mask)


@triton.jit
def _write_one(into: tl.tensor) -> None:
    tl.store(into, 1)


def build_problem() -> str:
    """Why no kernel can be built and run on the current GPU; "" if a trivial one can."""
    try:
        number = torch.zeros(1, dtype=torch.int32, device="cuda")
        _write_one[(1,)](number)
        # A failure on the device is known once it has run.
        number.item()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and subprocesses raise anything
        (line, *_) = str(error).strip().splitlines() or [""]
        return f"Triton cannot build a kernel: {type(error).__name__}: {line}"
    return ""
