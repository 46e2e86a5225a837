"""Compare each Triton kernel with PyTorch operations on random rows, on the device at hand.

Rows of 16 bits hold small integers, all of whose sums are exact; wider ones are random, and summed
in the same order: every bit is compared. Memory that is written is full of NaN before.

Notation: T = tokens, E = experts, N = rows, M = copies, W = most experts of any token, H = hidden
size, P = parts of the experts, or of each row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from monta_megatron.chains.stages import ExpertRange
from monta_megatron.chains.wire_format import row_bytes
from monta_megatron.exchange import copies as torch_copies
from monta_megatron.exchange import counts, errors
from monta_megatron.exchange import sums as torch_sums
from monta_megatron.exchange.copies import Copies, Parts
from monta_megatron.exchange.kernels import quantize
from monta_megatron.exchange.kernels.count_routing import count_routing
from monta_megatron.exchange.kernels.duplicate import duplicate
from monta_megatron.exchange.kernels.expert_lists import expert_ids_of
from monta_megatron.exchange.kernels.find_copies import find_copies
from monta_megatron.exchange.kernels.reduce import reduce
from monta_megatron.exchange.kernels.reduce_parts import reduce_parts
from monta_megatron.exchange.kernels.to_experts import to_experts
from monta_megatron.exchange.payload import Columns, Payload
from monta_megatron.exchange.sums import sum_parts, sum_rows

NUM_TOKENS, NUM_EXPERTS, TOPK = 83, 32, 6
NUM_NODES, NUM_RANKS, NUM_BLOCKS = 2, 8, 8
RANKS = ExpertRange(first=0, size=NUM_EXPERTS // NUM_RANKS, num_parts=NUM_RANKS)
LOCAL_EXPERTS = ExpertRange(first=8, size=1, num_parts=16)
LARGEST_VALUE = 8

# Results of a kernel and of PyTorch operations, by name.
Results = tuple[Mapping[str, torch.Tensor | None], Mapping[str, torch.Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Random rows on which kernels are compared.

    Attributes:
        hidden_size: H.
        dtype: of the rows.
        generator: of random numbers, on the device.
        routing_map: [T, E] bool, of TOPK experts for each token but the first, which has none.
        ids: [T, W] int32 experts of each token.
    """

    hidden_size: int
    dtype: torch.dtype
    generator: torch.Generator
    routing_map: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, hidden_size: int, dtype: torch.dtype) -> "Draw":
        """Drawn anew, the same every time."""
        generator = torch.Generator(device).manual_seed(0)
        scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator, device=device)
        routing_map = torch.zeros_like(scores, dtype=torch.bool)
        routing_map.scatter_(1, scores.topk(TOPK, dim=1).indices, True)[0] = False
        _, ids = counts.expert_ids_of(routing_map, scores, TOPK)
        return cls(
            hidden_size=hidden_size,
            dtype=dtype,
            generator=generator,
            routing_map=routing_map,
            ids=ids,
        )

    def copies(self, parts: ExpertRange) -> Copies:
        """The copies of the tokens, found by PyTorch operations."""
        last = parts.first + parts.size * parts.num_parts
        hits = self.routing_map[:, parts.first : last].unflatten(1, (parts.num_parts, -1))
        copies = Copies.empty(NUM_TOKENS, int(hits.any(dim=2).sum()), parts, self.ids.device)
        most = NUM_TOKENS, len(copies.row)
        torch_copies.find_copies(self.ids, Parts.of(parts, *most, self.ids), copies)
        return copies

    def columns(self, num_rows: int, width: int | None, ids: torch.Tensor | None = None) -> Columns:
        """Random rows [N, H] and fp32 probabilities, [N] without a width, in one message."""
        device = self.ids.device
        shape = (num_rows,) if width is None else (num_rows, width)
        probs = torch.rand(shape, generator=self.generator, device=device)
        shape = num_rows, self.hidden_size
        if self.dtype.itemsize < torch.float32.itemsize:
            rows = torch.randint(
                -LARGEST_VALUE, LARGEST_VALUE + 1, shape, generator=self.generator, device=device
            )
        else:
            rows = torch.randn(shape, generator=self.generator, device=device)
        values = Columns(rows.to(self.dtype), probs, ids)
        into = self.empty(values)
        for target, column in zip(into.tensors(), values.tensors(), strict=True):
            target.copy_(column)
        return into

    def empty(self, like: Columns, num_rows: int | None = None) -> Columns:
        """Columns like these in a message full of NaN, of as many rows if no number is given."""
        payload = Payload.of(like.tensors(), packed=True)
        messages = payload.allocate(len(like.rows) if num_rows is None else num_rows)
        for message in messages:
            message.view(torch.uint8).fill_(255)
        return payload.columns(messages)


def first_difference(device: torch.device, hidden_size: int, dtype: torch.dtype) -> str:
    """First kernel that differs from PyTorch operations, and where; "" if none does.

    Args:
        device: where the kernels run.
        hidden_size: H of the training: kernels differ by it.
        dtype: of its rows.
    """
    for name, compare in KERNELS.items():
        try:
            with torch.no_grad():
                actual, expected = compare(Draw.on(device, hidden_size, dtype))
            if line := _difference(actual, expected):
                return f"kernel {name}: {line}"
        except Exception as error:  # noqa: BLE001 - a compiler or a driver fails in its own way
            # All ranks have to hear of it.
            return f"kernel {name} does not run: {type(error).__name__}: {error}"
    return ""


def _difference(
    actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]
) -> str:
    for name, values in expected.items():
        ours = actual[name]
        if values is None or ours is None:
            continue
        if line := errors.first_difference(name, ours, values, "PyTorch's operations give"):
            return line
    return ""


def _count_routing(draw: Draw) -> Results:
    args = draw.routing_map, NUM_BLOCKS, {"node": NUM_NODES, "rank": NUM_RANKS}, True
    return count_routing(*args), torch_copies.count_routing(*args)


def _expert_lists(draw: Draw) -> Results:
    size = draw.routing_map.shape
    values = torch.rand(size, generator=draw.generator, device=draw.ids.device)
    results = []
    for function in (expert_ids_of, counts.expert_ids_of):
        probs = values.clone().requires_grad_()
        with torch.enable_grad():
            lists, ids = function(draw.routing_map, probs, TOPK)
            lists.backward(values[:, :TOPK])
        results.append({"lists": lists.detach(), "ids": ids, "gradient": probs.grad})
    return results[0], results[1]


def _find_copies(draw: Draw) -> Results:
    expected = draw.copies(LOCAL_EXPERTS)
    copies = Copies.empty(NUM_TOKENS, len(expected.row), LOCAL_EXPERTS, draw.ids.device)
    find_copies(draw.ids, LOCAL_EXPERTS, copies)
    return copies._asdict(), expected._asdict()


def _duplicate(draw: Draw) -> Results:
    columns, copies = draw.columns(NUM_TOKENS, TOPK, draw.ids), draw.copies(RANKS)
    into = draw.empty(columns, len(copies.row))
    duplicate(columns, copies, into)
    expected = Columns(*[column[copies.row] for column in columns.tensors()])
    return into._asdict(), expected._asdict()


def _to_experts(draw: Draw) -> Results:
    columns, copies = draw.columns(NUM_TOKENS, TOPK), draw.copies(LOCAL_EXPERTS)
    places = torch.randperm(len(copies.row), generator=draw.generator, device=draw.ids.device)
    expected = draw.columns(len(places), None)
    into = draw.empty(expected)
    to_experts(columns, copies, into, places)
    assert expected.probs is not None and columns.probs is not None, "drawn"
    expected.rows[places] = columns.rows[copies.row]
    expected.probs[places] = columns.probs[copies.row, copies.place]
    return into._asdict(), expected._asdict()


def _reduce(draw: Draw) -> Results:
    copies = draw.copies(RANKS)
    columns = draw.columns(len(copies.row), TOPK)
    into, dtype = draw.empty(columns, NUM_TOKENS), _sum_dtype(draw)
    unrounded = into.rows.new_empty(NUM_TOKENS, draw.hidden_size, dtype=dtype)
    reduce(columns, copies, into, dtype, unrounded=unrounded)
    sums = copies.sum_by_row(columns.rows, dtype)
    assert columns.probs is not None, "drawn"
    probs = sum_rows(columns.probs, copies.by_row, copies.row_starts)
    expected = {"rows": sums.to(draw.dtype), "probs": probs, "unrounded": sums}
    return {**into._asdict(), "unrounded": unrounded}, expected


def _reduce_experts(draw: Draw) -> Results:
    copies = draw.copies(LOCAL_EXPERTS)
    columns = draw.columns(len(copies.row), None)
    index = torch.randperm(len(copies.row), generator=draw.generator, device=draw.ids.device)
    into, dtype = draw.empty(draw.columns(NUM_TOKENS, TOPK)), _sum_dtype(draw)
    reduce(columns, copies, into, dtype, index)
    assert columns.probs is not None and into.probs is not None, "drawn"
    probs = torch.zeros_like(into.probs)
    probs[copies.row, copies.place] = columns.probs[index]
    rows = copies.sum_by_row(columns.rows, dtype, index).to(draw.dtype)
    return into._asdict(), {"rows": rows, "probs": probs}


def _reduce_parts(draw: Draw) -> Results:
    num_parts, rank, dtype = 4, 1, _sum_dtype(draw)
    columns = draw.columns(num_parts * NUM_TOKENS, TOPK)
    unrounded = draw.columns(NUM_TOKENS, TOPK).rows.to(dtype)
    into, expected = (draw.empty(columns, NUM_TOKENS) for _ in range(2))
    reduce_parts(columns, into, dtype, num_parts, unrounded, rank)
    sum_parts(expected.rows, columns.rows, dtype, num_parts, unrounded, rank)
    assert columns.probs is not None and expected.probs is not None, "drawn"
    sum_parts(expected.probs, columns.probs, torch.float32, num_parts)
    return into._asdict(), expected._asdict()


def _quantize(draw: Draw) -> Results:
    rows = draw.columns(NUM_TOKENS, None).rows
    index = torch.randperm(NUM_TOKENS, generator=draw.generator, device=rows.device)
    sent = torch.zeros(2, NUM_TOKENS, row_bytes(draw.hidden_size), dtype=torch.uint8).to(
        rows.device
    )
    arrived = rows.new_zeros(2, *rows.shape)
    for number, module in enumerate((quantize, torch_sums)):
        module.quantize(sent[number], rows, index)
        module.dequantize(arrived[number], sent[number], index)
    results = [{"bytes": sent[number], "rows": arrived[number]} for number in range(2)]
    return results[0], results[1]


def _sum_dtype(draw: Draw) -> torch.dtype:
    return torch.promote_types(draw.dtype, torch.float32)


KERNELS: Mapping[str, Callable[[Draw], Results]] = {
    "count_routing": _count_routing,
    "expert_lists": _expert_lists,
    "find_copies": _find_copies,
    "duplicate": _duplicate,
    "to_experts": _to_experts,
    "reduce": _reduce,
    "reduce, of copies for experts": _reduce_experts,
    "reduce_parts": _reduce_parts,
    "quantize": _quantize,
}
