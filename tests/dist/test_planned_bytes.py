"""For any counts and any chain, the planner's bytes by stage are those that the executor counts."""

import dataclasses
import random
from collections import Counter

import pytest
import torch
from counted_routing import CountedRouting
from exchanges import ROUTINGS, Case, find_groups, make_data, make_source
from pool import Pools
from test_exchange_properties import DTYPES, runnable

from monta_megatron.chains import CHAINS
from monta_megatron.chains.counts import message_size
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import FORWARD_BACKWARD, RowFormat
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.planner.traffic import pass_traffic

# Every chain on every shape, and some twice.
NUM_CASES = 60

BytesByPass = dict[str, dict[tuple[str, str], int]]


def bytes_of_passes(cases: list[Case]) -> list[BytesByPass]:
    """On a rank: what the executor sent for each case, by pass, then by stage and resource."""
    return [_bytes_of_passes(case) for case in cases]


def _bytes_of_passes(case: Case) -> BytesByPass:
    exchange_index, rank, _, _ = find_groups(case.chain, case.ep, case.etp, case.ranks_per_node)
    data = make_data(case, exchange_index)
    source = make_source(case, data)
    exchange = source.exchange
    found: BytesByPass = {}

    def note(pass_name: str) -> None:
        found[pass_name] = {
            key: count for key, count in exchange.monitor.bytes_sent.items() if count
        }
        exchange.monitor.bytes_sent.clear()

    rows = source.rows(data.tokens[rank]).requires_grad_()
    probs = source.probs.clone().requires_grad_()
    expert_rows, expert_probs = dispatch(exchange, rows, probs, source.ids)
    note("dispatch")
    torch.autograd.backward(
        [expert_rows, expert_probs], [data.expert_rows[rank], data.expert_probs[rank]]
    )
    note("dispatch_backward")
    outputs = data.expert_rows[rank].clone().requires_grad_()
    combined = combine(exchange, outputs)
    note("combine")
    combined.backward(source.rows(data.gradients[rank]))
    note("combine_backward")
    return found


def planned_bytes(case: Case, rank: int) -> BytesByPass:
    """What the planner makes of the same routing."""
    maps = tuple(each.numpy() for each in make_data(case).routing_maps)
    routing = CountedRouting(name="recorded", routing_maps=maps)
    chain, layout = CHAINS[case.chain], case.layout(rank)
    counts = routing.counts(chain, layout, 0, case.num_blocks)
    bound = chain.bind(layout, counts, case.num_chunks)
    row = RowFormat(
        hidden_size=case.hidden,
        value_bytes=case.torch_dtype.itemsize,
        prob_bytes=getattr(torch, case.probs_dtype).itemsize,
        sum_bytes=max(case.sum_dtype.itemsize, case.torch_dtype.itemsize),
    )
    found: BytesByPass = {}
    for pass_ in FORWARD_BACKWARD:
        program = lower(bound, pass_, row, routing.max_experts_per_token, "host")
        found[pass_.name] = {
            (stage.stage, resource): count
            for stage in pass_traffic([program], len(maps[rank]), case.num_blocks).pipeline
            for resource in ("inter", "intra")
            if (count := stage.sent_bytes(resource, [1]))
        }
    return found


def random_cases() -> list[Case]:
    """Every chain on every shape in turn, with data drawn anew."""
    draw = random.Random(0)
    found = []
    for chain, (ep, etp, ranks_per_node) in (runnable(4) * NUM_CASES)[:NUM_CASES]:
        dtype, probs_dtype = draw.choice(DTYPES)
        num_chunks = 1 if CHAINS[chain].serial else draw.randint(1, 7)
        found.append(
            Case(
                chain=chain,
                ep=ep,
                etp=etp,
                ranks_per_node=ranks_per_node,
                num_local_experts=draw.randint(1, 3),
                topk=draw.randint(1, 4),
                tokens=tuple(draw.choice([0, 1, 5, 12, 40]) for _ in range(ep * etp)),
                hidden=draw.choice([8, 3, 1]),
                dtype=dtype,
                probs_dtype=probs_dtype,
                routing=draw.choice(ROUTINGS),
                num_chunks=num_chunks,
                num_blocks=num_chunks + draw.randint(0, 3),
                seed=draw.randint(0, 1000),
            )
        )
    return found


def test_planned_bytes_are_counted_bytes(pools: Pools) -> None:
    cases = random_cases()
    seen: Counter[tuple[str, str]] = Counter()
    for rank, counted in enumerate(pools[4].run(bytes_of_passes, cases)):
        for case, by_pass in zip(cases, counted, strict=True):
            # Where an exchange is smaller than the world, the second one has data of its own.
            if rank < case.size:
                assert by_pass == planned_bytes(case, rank), f"{case}, rank {rank}"
                seen.update(key for sent in by_pass.values() for key in sent)
    # Every collective of every chain, on each resource that it can cross.
    assert len(seen) == 7, f"stages and resources that sent anything: {sorted(seen)}"


@pytest.mark.parametrize("chain", CHAINS)
def test_the_exchanged_counts_are_as_many_as_planned(chain: str) -> None:
    from monta_megatron.exchange.count_messages import CountMessages

    case = dataclasses.replace(Case(chain=chain), num_blocks=3)
    layout = case.layout(1)
    expected = message_size((CHAINS[chain],), layout, case.num_blocks)
    num_blocks = case.num_blocks if CHAINS[chain].rows == "tokens" else 1
    count_messages = CountMessages(chains=(CHAINS[chain],), layout=layout, num_blocks=num_blocks)
    messages, _ = count_messages.count(make_data(case).routing_maps[1])
    assert messages.flatten(1).shape == (case.size, expected)
