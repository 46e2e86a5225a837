"""Wire format of rows in eight bits: e4m3 values in groups, each with its own scale. No torch.

    H values of e4m3 | to a multiple of 4 | a scale in fp32 for every 128 of them | to one of 16

A value is its e4m3 value times the scale of its group: the least power of two with which the
largest of the group is at most 448, which is e4m3's largest, and at least 2^-126. So scaling
rounds nothing, and values of four bits, such as small integers, come through as they are.

    within 2^-14 of the largest of its group   off by at most 2^-4 of itself
    smaller                                    off by at most 2^-10 of the scale; far below it: 0
    zero                                       zero, with its sign
    subnormal in bf16 and fp32                 a group of them has the least scale, whose smallest
                                               step is 2^-135
    above 1.9375 x 2^127                       infinity
    an infinity or NaN in a group              the whole group arrives as NaN
"""

from monta_megatron.chains.program import ALIGNMENT_BYTES, round_up

GROUP_SIZE = 128
SCALE_BYTES = 4


def scales_offset_bytes(hidden_size: int) -> int:
    """Offset of the scales in a row."""
    return round_up(hidden_size, SCALE_BYTES)


def num_groups(hidden_size: int) -> int:
    """Groups of a row; the last one may be smaller."""
    return round_up(hidden_size, GROUP_SIZE) // GROUP_SIZE


def row_bytes(hidden_size: int) -> int:
    """Bytes of a row's hidden values and their scales: 7,392 for 7,168 values."""
    end = scales_offset_bytes(hidden_size) + SCALE_BYTES * num_groups(hidden_size)
    return round_up(end, ALIGNMENT_BYTES)
