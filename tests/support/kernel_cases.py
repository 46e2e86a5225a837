"""Random cases for the Triton kernels against the PyTorch operations, interpreted or on a GPU.

Triton's interpreter needs TRITON_INTERPRET=1 before the kernels are imported. To and from bf16 it
converts otherwise than a GPU: it truncates, and subnormal values become 0. There are none in sums
of bf16 there, which are compared before they are rounded; `test_compiled_kernels.py` reads how.
"""

import os
import random
from dataclasses import dataclass
from unittest import TestCase

import torch
from equal import assert_equal
from fake_world import empty_copies, format_of

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange import count_messages, rows
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.kernels.copies import duplicate, find_copies
from monta_megatron.exchange.kernels.routing import count_routing, lists_backward, make_lists
from monta_megatron.exchange.kernels.sums import reduce, reduce_ranks
from monta_megatron.exchange.rows import Copies, PartBounds, expert_ids_of, sum_ranks, sum_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HIDDEN_SIZES = (8, 9, 12, 40, 72, 136, 520, 1000, 1032, 2056, 4096, 7168)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-40, 65504.0)
# Values of all rows: what a case costs the interpreter. A GPU has 60 rows of any size.
MOST_VALUES = 16_000 if INTERPRETED else 60 * 4 * HIDDEN_SIZES[-1]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is drawn from a seed.

    Attributes:
        num_rows: N.
        hidden_size: H.
        parts: of the experts.
        num_experts: E; some may lie in no part.
        routing: "random", or each row's experts: "none", "all", or the same "one" for all rows.
        padding: places of a list beyond the longest one.
        dtype: of the rows.
        probs_dtype: of the probabilities; None if they do not travel.
        packed: the columns of a row share a message.
        in_place: copies are read by an index, or put into place, among other rows.
        seed: of all values.
    """

    num_rows: int
    hidden_size: int
    parts: Parts
    num_experts: int
    routing: str
    padding: int
    dtype: torch.dtype
    probs_dtype: torch.dtype | None
    packed: bool
    in_place: bool
    seed: int


def case_of(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    hidden_size = draw.choice(HIDDEN_SIZES)
    most_rows = min(60, max(3, MOST_VALUES // hidden_size // 4))
    parts = Parts(
        first=draw.choice((0, 0, 1, 8)),
        size=draw.choice((1, 1, 2, 3, 8)),
        num_parts=draw.choice((1, 2, 3, 4, 8, 17)),
    )
    dtype = draw.choice(DTYPES)
    return Case(
        num_rows=draw.choice((0, 1, 2, draw.randint(3, most_rows), min(40, most_rows))),
        hidden_size=hidden_size,
        parts=parts,
        num_experts=parts.first + parts.size * parts.num_parts + draw.choice((0, 0, 1, 5)),
        routing=draw.choice(("random", "random", "random", "one", "none", "all")),
        padding=draw.choice((0, 0, 1, 9)),
        dtype=dtype,
        probs_dtype=draw.choice((torch.float32, dtype, None)),
        packed=draw.random() < 0.7,
        in_place=draw.random() < 0.5,
        seed=seed,
    )


def check(first: int, end: int, device: str = "cpu") -> None:
    """Compare the kernels with the PyTorch operations on the cases of these seeds.

    Args:
        first, end: the seeds.
        device: of all tensors; "cpu" for the interpreter.

    Raises:
        AssertionError: names the case, the kernel and the column that differ.
    """
    assert (device == "cpu") == INTERPRETED, f"TRITON_INTERPRET does not fit kernels on {device}"
    for seed in range(first, end):
        case = case_of(seed)
        torch.manual_seed(seed)
        try:
            with torch.device(device):
                _check(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def _check(case: Case) -> None:
    routing_map, parts = _routing_map(case), case.parts
    most = max(int(routing_map.sum(dim=1).max()) if case.num_rows else 0, 1) + case.padding
    width = min(most, case.num_experts)
    _, ids = expert_ids_of(routing_map, torch.zeros(routing_map.shape), width)
    inside = routing_map[:, parts.first : parts.first + parts.size * parts.num_parts]
    num_copies = int(inside.unflatten(1, (parts.num_parts, -1)).any(dim=2).sum())

    before = _message(case, case.num_rows, width, with_ids=True)
    if before.ids is not None:
        before.ids.copy_(ids)
        ids = before.ids
    made, copies = (empty_copies(case.num_rows, num_copies, parts, ids.device) for _ in range(2))
    rows.find_copies(ids, PartBounds.of(parts, case.num_rows, num_copies, ids), copies)
    find_copies(ids, parts, made)
    for name, expected in copies._asdict().items():
        if expected is not None:
            _same(f"find_copies, {name}", getattr(made, name), expected)
    if INTERPRETED and case.num_rows and case.seed % 10 == 0:
        uncounted = empty_copies(case.num_rows, num_copies + 1, parts, ids.device)
        with TestCase().assertRaisesRegex(Exception, "ids and counts of copies disagree"):
            find_copies(ids, parts, uncounted)
    for per_expert in (False, True) if parts.size == 1 else (False,):
        _check_duplicate(case, before, copies, width, per_expert)
    _check_reduce(case, copies, width)
    _check_reduce_ranks(case, width)
    _check_lists(case, routing_map, width)
    _check_counts(case)


def _check_duplicate(
    case: Case, before: Columns, copies: Copies, width: int, per_expert: bool
) -> None:
    num_copies = len(copies.row)
    num_rows = num_copies + 3 * case.in_place
    into = _message(case, num_rows, None if per_expert else width, with_ids=before.ids is not None)
    # What a kernel does not write has to stay as it is.
    expected, index = _clone(into), torch.randperm(num_rows)[:num_copies]
    if not case.in_place:
        index = torch.arange(num_copies)
    for target, column in zip(expected.tensors(), before.tensors(), strict=False):
        one_each = target.dim() < column.dim()
        target[index] = column[copies.row, copies.place] if one_each else column[copies.row]
    duplicate(before, copies, into, index if case.in_place else None)
    _same_columns(f"duplicate, per expert {per_expert}", into, expected)


def _check_reduce(case: Case, copies: Copies, width: int) -> None:
    num_copies, dtype = len(copies.row), torch.promote_types(torch.float32, case.dtype)
    # Lists do not come from an index.
    per_expert = case.parts.size == 1 and (case.in_place or case.seed % 2 == 0)
    in_place = case.in_place and (per_expert or case.probs_dtype is None)
    num_rows = num_copies + 5 * in_place
    index = torch.randperm(num_rows)[:num_copies] if in_place else None
    columns = _message(case, num_rows, None if per_expert else width)
    for values in columns.tensors():
        if values.dtype == torch.bfloat16:
            _drop_subnormals(values)
    into = _message(case, case.num_rows, width)
    expected, sums = _clone(into), copies.sum_by_row(columns.rows, dtype, index)
    expected.rows.copy_(_narrowed(sums, case.dtype))
    if columns.probs is not None and expected.probs is not None:
        if per_expert:
            shares = columns.probs if index is None else columns.probs[index]
            expected.probs.zero_()[copies.row, copies.place] = shares
        else:
            # A probability is in the list of one copy; those of the others add 0.
            chosen = torch.randint(1 << 30, columns.probs.shape)
            most = chosen.new_zeros(case.num_rows, width)
            most.scatter_reduce_(0, copies.row[:, None].expand(-1, width), chosen, "amax")
            columns.probs.masked_fill_(chosen < most[copies.row], 0)
            columns.probs.masked_fill_(columns.probs.abs() < 1e-30, 0)
            expected.probs.copy_(sum_rows(columns.probs, copies.by_row, copies.row_starts))
    # This rank's own rows, among those of a group.
    first = case.num_rows // 3
    unrounded, everything = torch.full_like(sums[first:], torch.nan), torch.full_like(sums, 7)
    reduce(columns, copies, into, dtype, index, unrounded, first)
    _same_columns("reduce", into, expected, with_nan=True)
    _same("reduce, unrounded", unrounded, sums[first:], with_nan=True)
    reduce(columns, copies, Columns(everything), dtype, index)
    _same("reduce in the dtype of the sum", everything, sums, with_nan=True)


def _check_reduce_ranks(case: Case, width: int) -> None:
    num_parts, ranks_per_sum = ((1, 1), (2, 2), (5, 5), (4, 2), (6, 2), (9, 3))[case.seed % 6]
    num_rows, rank = min(case.num_rows, 9), case.seed % num_parts
    dtype = torch.promote_types(torch.float32, case.dtype)
    of_list = None if case.in_place else width
    columns = _message(case, num_parts * num_rows, of_list)
    into = _message(case, num_rows, of_list)
    kept = _values((num_rows, case.hidden_size), dtype) if dtype != case.dtype else None
    if torch.bfloat16 in (case.dtype, case.probs_dtype):
        for values in (*columns.tensors(), *([] if kept is None else [kept])):
            _drop_subnormals(values)
    sums, reduced = (torch.empty(num_rows, case.hidden_size, dtype=dtype) for _ in range(2))
    sum_ranks(sums, columns.rows, dtype, ranks_per_sum, kept, rank)
    reduce_ranks(Columns(columns.rows), Columns(reduced), dtype, ranks_per_sum, kept, rank)
    _same("reduce_ranks in the dtype of the sum", reduced, sums, with_nan=True)
    expected = _clone(into)
    expected.rows.copy_(_narrowed(sums, case.dtype))
    if columns.probs is not None and expected.probs is not None:
        wide = torch.promote_types(torch.float32, columns.probs.dtype)
        shares = torch.empty(expected.probs.shape, dtype=wide)
        sum_ranks(shares, columns.probs, wide, ranks_per_sum)
        expected.probs.copy_(_narrowed(shares, columns.probs.dtype))
    reduce_ranks(columns, into, dtype, ranks_per_sum, kept, rank)
    _same_columns("reduce_ranks", into, expected, with_nan=True)


def _check_lists(case: Case, routing_map: torch.Tensor, width: int) -> None:
    dtype = case.probs_dtype or torch.float32
    probs = _values((case.num_rows, case.num_experts), dtype)
    gradient = _values((case.num_rows, width), dtype)
    expected, actual = (
        (*rows.make_lists(routing_map, probs, width), rows.lists_backward(routing_map, gradient)),
        (*make_lists(routing_map, probs, width), lists_backward(routing_map, gradient)),
    )
    for name, *pair in zip(("lists", "ids", "gradient"), actual, expected, strict=True):
        _same(f"expert lists, {name}", *pair)


def _check_counts(case: Case) -> None:
    outer, inner, size = ((1, 1, 5), (2, 6, 3), (3, 3, 4), (4, 8, 1))[case.seed % 4]
    shape = (case.seed * 7 % 140 if case.num_rows > 1 else case.num_rows, inner * size)
    routing_map = torch.rand(shape) < (0.0, 0.1, 0.5, 1.0)[case.seed // 4 % 4]
    parts = ({}, {"node": outer}, {"rank": inner}, {"node": outer, "rank": inner})
    args = (1, 3, 8)[case.seed % 3], parts[case.seed // 3 % 4], True
    expected = count_messages.count_routing(routing_map, *args)
    actual = count_routing(routing_map, *args)
    assert actual.keys() == expected.keys(), "count_routing"
    for name, counts in actual.items():
        assert counts.is_contiguous(), name
        _same(f"count_routing, {name}", counts, expected[name])


def _routing_map(case: Case) -> torch.Tensor:
    shape = case.num_rows, case.num_experts
    if case.routing == "random":
        return torch.rand(shape) < random.Random(case.seed).choice((0.05, 0.3, 0.8))
    routing_map = torch.full(shape, case.routing == "all")
    if case.routing == "one":
        routing_map[:, case.seed % case.num_experts] = True
    return routing_map


def _message(case: Case, num_rows: int, width: int | None, with_ids: bool = False) -> Columns:
    """Columns full of random and special values; [N] probabilities if there is no width."""
    columns = [_values((num_rows, case.hidden_size), case.dtype)]
    if case.probs_dtype is not None:
        shape = (num_rows,) if width is None else (num_rows, width)
        columns.append(_values(shape, case.probs_dtype))
        if with_ids and width is not None:
            columns.append(torch.randint(99, shape, dtype=torch.int32))
    payload = format_of(columns, packed=case.packed)
    into = payload.columns(payload.allocate(num_rows))
    for target, values in zip(into.tensors(), columns, strict=True):
        target.copy_(values)
    return into


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float32).to(dtype)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)].to(dtype)
    return torch.where(torch.rand(shape) < 0.02, special, values)


def _drop_subnormals(values: torch.Tensor) -> None:
    """Where it calculates, the interpreter takes those of bf16 for 0."""
    if INTERPRETED:
        values.masked_fill_(values.abs() < torch.finfo(torch.bfloat16).tiny, 0)


def _narrowed(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the interpreter narrows: to bf16 it cuts off the lower half."""
    if dtype != torch.bfloat16 or not INTERPRETED:
        return sums.to(dtype)
    return (sums.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _clone(columns: Columns) -> Columns:
    return Columns(*(None if value is None else value.clone() for value in columns))


def _same_columns(what: str, actual: Columns, expected: Columns, with_nan: bool = False) -> None:
    for name, values in expected._asdict().items():
        if values is not None:
            _same(f"{what}, {name}", getattr(actual, name), values, with_nan)


def _same(what: str, actual: torch.Tensor, expected: torch.Tensor, with_nan: bool = False) -> None:
    """The same bits; of sums, NaN where NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    if with_nan:
        both = actual.isnan() & expected.isnan()
        actual, expected = (each.masked_fill(both, 0) for each in (actual, expected))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    pair = (each.contiguous().view(integers) for each in (actual, expected))
    assert_equal(*pair, f"{what}, in bits")
