"""Rows into eight bits, and back: `chains.wire_format`.

    into[n] = e4m3(rows[index[n]] / scale), scale;   into[index[n]] = rows[n].e4m3 * rows[n].scale

Bytes: a row, read once, and a quantized row, written once; and the other way round.
Grid: [N / rows of a tile, groups / groups of a tile]. All by integers and products with powers of
two, so one code serves GPUs with and without e4m3, and gives the bits of `exchange.sums`.

Notation: N = rows, H = hidden size, B = bytes of a quantized row, G = groups of a row.
"""

import torch
import triton
import triton.language as tl

from monta_megatron.chains.program import ALIGNMENT_BYTES
from monta_megatron.chains.wire_format import GROUP_SIZE, num_groups
from monta_megatron.exchange import sums
from monta_megatron.exchange.kernels.tiles import blocks_of, kernel, launch

GROUP = tl.constexpr(GROUP_SIZE)
ALIGNMENT = tl.constexpr(ALIGNMENT_BYTES)
# Groups that a program works on: 16 values for each thread.
TILE_GROUPS = 16
CARRY = tl.constexpr(sums.CARRY)
LARGEST_EXPONENT = tl.constexpr(sums.LARGEST_EXPONENT)
INFINITY_BITS = tl.constexpr(sums.INFINITY_BITS)
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Of e4m3: 3 bits of mantissa, 20 fewer than fp32, and an exponent with another bias.
DROPPED = tl.constexpr(20)
HALF_OF_LAST = tl.constexpr((1 << 19) - 1)
BIASES = tl.constexpr(sums.BIASES)
BIASES_FACTOR = tl.constexpr(2.0**sums.BIASES)
LEAST_NORMAL = tl.constexpr(2.0**-6)
# An fp32 number whose last bit is 2^-9, the least step of e4m3: adding it rounds to that.
ROUNDS_TO_STEP = tl.constexpr(2.0**14)
ROUNDS_TO_STEP_BITS = tl.constexpr((127 + 14) << 23)


def quantize(into: torch.Tensor, rows: torch.Tensor, index: torch.Tensor | None = None) -> None:
    """As `sums.quantize`; of a group with a NaN or infinity only the scale has the same bits."""
    sums.clear_gaps(into, rows.shape[1])
    _launch(_quantize, len(into), rows, into, index)


def dequantize(into: torch.Tensor, rows: torch.Tensor, index: torch.Tensor | None = None) -> None:
    """As `sums.dequantize`."""
    _launch(_dequantize, len(rows), into, rows, index)


def _launch(
    function: object,
    num_rows: int,
    rows: torch.Tensor,
    quantized: torch.Tensor,
    index: torch.Tensor | None,
) -> None:
    hidden_size = rows.shape[1]
    groups = num_groups(hidden_size)
    tile_groups = min(triton.next_power_of_2(groups), TILE_GROUPS)
    tile_rows = TILE_GROUPS // tile_groups
    # So many values are read or written at once, of a byte each.
    unit = 1 if (hidden_size | rows.stride(0)) % ALIGNMENT_BYTES else ALIGNMENT_BYTES
    _, scales = sums.values_and_scales(quantized, hidden_size)
    launch(
        function,
        (blocks_of(num_rows, tile_rows), blocks_of(groups, tile_groups)),
        rows,
        quantized,
        scales,
        index,
        num_rows,
        hidden_size // unit,
        rows.stride(0) // unit,
        quantized.stride(0) // ALIGNMENT_BYTES,
        scales.stride(0),
        unit,
        tile_rows,
        tile_groups,
    )


@kernel("rows", "quantized")
def _quantize(
    rows: tl.tensor,
    quantized: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    num_rows: tl.int32,
    num_units: tl.int32,
    stride: tl.int32,
    quantized_stride: tl.int32,
    scales_stride: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row, group, is_group, value, is_value = _tile(num_rows, num_units, UNIT, ROWS, GROUPS)
    source = row if index is None else tl.load(index + row, is_group, other=0)
    values = tl.load(rows + source[:, None] * (stride * UNIT) + value, is_value, other=0.0).to(
        tl.float32
    )
    bits = values.to(tl.int32, bitcast=True)
    largest = tl.max(bits & MAGNITUDE, axis=1)
    carried = (tl.minimum(largest, INFINITY_BITS) + CARRY) >> 23
    exponent = tl.maximum(carried - LARGEST_EXPONENT, 1)
    scale_bits = tl.where(largest >= INFINITY_BITS, NAN_BITS, exponent << 23)
    scale = scale_bits.to(tl.float32, bitcast=True)
    tl.store(scales + row * scales_stride + group, scale, is_group)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    size = tl.abs(values) * inverse[:, None]
    size_bits = size.to(tl.int32, bitcast=True)
    # To the nearest, and to even between two.
    nearest = (size_bits + HALF_OF_LAST + ((size_bits >> DROPPED) & 1)) >> DROPPED
    of_steps = (size + ROUNDS_TO_STEP).to(tl.int32, bitcast=True) - ROUNDS_TO_STEP_BITS
    code = tl.where(size < LEAST_NORMAL, of_steps, nearest - (BIASES << 3))
    code |= (bits >> 24) & 0x80
    tl.store(
        quantized + row[:, None] * (quantized_stride * ALIGNMENT) + value,
        code.to(tl.uint8),
        is_value,
    )


@kernel("rows", "quantized")
def _dequantize(
    rows: tl.tensor,
    quantized: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    num_rows: tl.int32,
    num_units: tl.int32,
    stride: tl.int32,
    quantized_stride: tl.int32,
    scales_stride: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row, group, is_group, value, is_value = _tile(num_rows, num_units, UNIT, ROWS, GROUPS)
    target = row if index is None else tl.load(index + row, is_group, other=0)
    code = tl.load(
        quantized + row[:, None] * (quantized_stride * ALIGNMENT) + value, is_value, other=0
    )
    code = code.to(tl.int32)
    bits = ((code & 0x7F) << DROPPED) | ((code & 0x80) << 24)
    scale = tl.load(scales + row * scales_stride + group, is_group, other=0.0)
    values = bits.to(tl.float32, bitcast=True) * BIASES_FACTOR * scale[:, None]
    values = values.to(rows.dtype.element_ty)
    tl.store(rows + target[:, None] * (stride * UNIT) + value, values, is_value)


@triton.jit
def _tile(
    num_rows: tl.int32,
    num_units: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Row and group of a tile's groups, and whether there are such: [ROWS * GROUPS].

    Also the number of their values, and whether there are such: [ROWS * GROUPS, 128].
    """
    number = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + number // GROUPS
    group = tl.program_id(1) * GROUPS + number % GROUPS
    is_group = (row < num_rows) & (group * GROUP < num_units * UNIT)
    value = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return row, group, is_group, value, is_group[:, None] & (value < num_units * UNIT)
