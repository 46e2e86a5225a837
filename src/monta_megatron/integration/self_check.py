"""At the first use of a chain: it gives what stock's dispatcher gives, on the real groups.

Random rows are dispatched and combined by both, along the routing of the micro-batch at hand, so
counts and sizes are real. A driver, a network or a library that moves rows wrongly here ends the
run before it trains on them.

Rows are small integers, which the experts multiply by 1 or 2: every sum of them is exact in the
rows' dtype, whatever its order, and everything is compared bit for bit.

Notation: T = tokens of this rank, H = hidden size, E = experts, N = rows for the L local experts.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.common.quantities import counted
from monta_megatron.exchange.autograd import combine, dispatch
from monta_megatron.exchange.count_table import ExchangeCounts
from monta_megatron.exchange.differences import first_difference
from monta_megatron.exchange.groups import gather_objects
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.integration.strategies import STRATEGIES

# Rows hold integers from 0 to this, fewer where their sums would not be exact.
LARGEST_VALUE = 3
LARGEST_FACTOR = 2

# What was checked on a group: number of experts, chain, number of chunks.
_checked: set[tuple[dist.ProcessGroup, int, str, int]] = set()


class SelfCheckError(RuntimeError):
    """What runs gives something else than what it stands for; names it, ranks and coordinate."""


@dataclass(frozen=True)
class RoundTrip:
    """What a dispatcher has brought to the experts, and back.

    Attributes:
        rows: [N, H] at the experts.
        probs: [N] at the experts.
        tokens_per_expert: [L].
        output: [S/TP, B, H].
    """

    rows: torch.Tensor
    probs: torch.Tensor
    tokens_per_expert: torch.Tensor
    output: torch.Tensor


def check_first_use(dispatcher: Any, stock_dispatcher: Any, counts: ExchangeCounts) -> None:
    """Compare the chain that was just chosen with stock's dispatcher, unless it was before.

    All ranks of the exchange call it at the same place, and wait for each other.

    Args:
        dispatcher: a MontaTokenDispatcher that has taken a chain and dispatched nothing yet.
        stock_dispatcher: makes stock's dispatcher for the same layer.
        counts: of the micro-batch under way.

    Raises:
        SelfCheckError: there is a difference on a rank of the exchange.
    """
    group, chain, num_chunks = dispatcher.tp_ep_group, dispatcher.chain, dispatcher.num_chunks
    key = group, dispatcher.layout.num_experts, chain.name, num_chunks
    if key in _checked:
        return
    _checked.add(key)
    with torch.no_grad():
        tokens = random_rows(dispatcher)
        ours = _our_round_trip(dispatcher, tokens, counts)
        theirs = _stock_round_trip(stock_dispatcher(), dispatcher, tokens)
    what = (
        f"chain {chain.name} in {counted(num_chunks, 'chunk')} does not give what stock's "
        f"dispatcher gives"
    )
    advice = "Report it, and train with moe_token_dispatcher_type alltoall"
    end_if_any(gather_objects(difference(ours, theirs), group), group, what, advice)


def end_if_any(
    differences: Sequence[str], group: dist.ProcessGroup, what: str, advice: str
) -> None:
    """End the run on all ranks of an exchange if there is a difference on one.

    Args:
        differences: of each rank; "" where there is none.
        group: the ranks.
        what: what is wrong then.
        advice: what to do.

    Raises:
        SelfCheckError: there is a difference.
    """
    ranks = dist.get_process_group_ranks(group)
    lines = {rank: line for rank, line in zip(ranks, differences, strict=True) if line}
    if lines:
        rank, line = next(iter(lines.items()))
        raise SelfCheckError(
            f"moe_monta_check: {what}, on rank {', '.join(map(str, lines))} of the ranks "
            f"{', '.join(map(str, ranks))}; on rank {rank} {line}. {advice}"
        )


def random_rows(dispatcher: Any) -> torch.Tensor:
    """[S/TP, B, H] integers in the rows' dtype; the training's random numbers are not touched."""
    dtype, like = dispatcher.config.params_dtype, dispatcher.probs
    most_terms = dispatcher.layout.etp * _most_experts(dispatcher)
    # Integers up to 2 / eps are exact.
    exact = int(2 / torch.finfo(dtype).eps) // (LARGEST_FACTOR * most_terms)
    largest = max(min(exact, LARGEST_VALUE), 1)
    generator = torch.Generator(like.device).manual_seed(dispatcher.layout.rank)
    return torch.randint(
        largest + 1, dispatcher.hidden_shape, generator=generator, device=like.device
    ).to(dtype)


def difference(ours: RoundTrip, theirs: RoundTrip) -> str:
    """Where one round trip first differs from another; "" if it does not."""
    for name in (entry.name for entry in fields(RoundTrip)):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine.shape != other.shape:
            return f"{name} has shape {list(mine.shape)}, stock's {list(other.shape)}"
        if line := first_difference(name, mine, other, "stock's is"):
            return line
    return ""


def _most_experts(dispatcher: Any) -> int:
    """The most experts that any token of this rank may have."""
    if dispatcher.drop_and_pad:
        return int(dispatcher.layout.num_experts)
    experts = dispatcher.routing_map.sum(dim=1)
    return int(experts.max()) if len(experts) else 1


def _our_round_trip(dispatcher: Any, tokens: torch.Tensor, counts: ExchangeCounts) -> RoundTrip:
    # What the phases set stays on this copy.
    probe = copy.copy(dispatcher)
    probe.shared_experts, probe.monitor = None, Monitor()
    strategy = STRATEGIES[probe.chain.rows]
    exchange = strategy.bind(probe, counts)
    probe.num_out_tokens = int(exchange.bound.num_source_rows)
    # [S/TP, B, H] -> [T, H]
    entered, entered_probs = strategy.enter(probe, tokens.flatten(0, 1), probe.probs)
    columns = strategy.columns(probe, exchange, entered_probs)
    rows, probs = dispatch(exchange, entered, *columns)
    tokens_per_expert = torch.from_numpy(exchange.bound.rows_per_local_expert)
    combined = combine(exchange, _experts(dispatcher, rows, tokens_per_expert))
    return RoundTrip(rows, probs, tokens_per_expert, strategy.leave(probe, combined))


def _stock_round_trip(made: Any, dispatcher: Any, tokens: torch.Tensor) -> RoundTrip:
    routing_map, num_experts = dispatcher.routing_map, dispatcher.layout.num_experts
    if routing_map.shape[1] > num_experts:
        # [T, 2E] -> [T, E]: stock pads by itself; see `fill_to_capacity`.
        routing_map = routing_map.unflatten(1, (num_experts, -1))[..., 0]
    rows, probs = made.dispatch_preprocess(tokens, routing_map, dispatcher.probs)
    rows, tokens_per_expert, probs = made.dispatch_postprocess(*made.token_dispatch(rows, probs))
    tokens_per_expert = torch.as_tensor(tokens_per_expert).cpu()
    computed = made.combine_preprocess(_experts(dispatcher, rows, tokens_per_expert))
    output = made.combine_postprocess(made.token_combine(computed))
    return RoundTrip(rows, probs, tokens_per_expert, output)


def _experts(dispatcher: Any, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """[N, H] times 1 or 2, which differs between an expert and the next, and its ETP ranks."""
    layout = dispatcher.layout
    numbers = (
        torch.arange(layout.num_local_experts) + layout.first_expert + layout.rank % layout.etp
    )
    factors = (1 + numbers % LARGEST_FACTOR).repeat_interleave(tokens_per_expert)
    # [N] -> [N, 1]
    return rows * factors.to(rows)[:, None]
