"""For any counts and any chain, the planner's bytes by stage are those that the executor counts."""

from collections import Counter
from itertools import islice

import pytest
import torch
from counted_routing import CountedRouting
from exchanges import BytesByPass, Case, make_data, place_of, run_passes
from pool import Pools
from test_exchange_properties import draw_cases

from monta_megatron.chains import CHAINS
from monta_megatron.chains.chain import message_size
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import FORWARD_BACKWARD, RowFormat
from monta_megatron.exchange.count_messages import CountMessages
from monta_megatron.planner.traffic import pass_traffic

# Every chain on every shape, and some twice.
NUM_CASES = 60


def counted_bytes(cases: list[Case]) -> list[BytesByPass]:
    """What a rank sent in each case."""
    return [run_passes(case, make_data(case, place_of(case)[0]))[1] for case in cases]


def planned_bytes(case: Case, rank: int) -> BytesByPass:
    """What the planner makes of the same routing."""
    maps = tuple(each.numpy() for each in make_data(case).routing_maps)
    routing = CountedRouting(routing_maps=maps)
    chain, layout = CHAINS[case.chain], case.layout(rank)
    counts = routing.counts(chain, layout, 0, case.num_blocks)
    bound = chain.bind(layout, counts, 1 if chain.serial else case.num_chunks)
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


def test_planned_bytes_are_counted_bytes(pools: Pools) -> None:
    cases = list(islice(draw_cases(4, seed=0), NUM_CASES))
    seen: Counter[tuple[str, str]] = Counter()
    for rank, counted in enumerate(pools[4].run(counted_bytes, cases)):
        for case, by_pass in zip(cases, counted, strict=True):
            # Where an exchange is smaller than the world, the second one has data of its own.
            if rank < case.size:
                assert by_pass == planned_bytes(case, rank), f"{case}, rank {rank}"
                seen.update(key for sent in by_pass.values() for key in sent)
    # Every collective of every chain, on each resource that it can cross.
    assert len(seen) == 7, f"stages and resources that sent anything: {sorted(seen)}"


@pytest.mark.parametrize("chain", CHAINS)
def test_the_exchanged_counts_are_as_many_as_planned(chain: str) -> None:
    case = Case(chain=chain, num_blocks=3)
    layout, num_blocks = case.layout(1), 3 if CHAINS[chain].rows == "tokens" else 1
    table = CountMessages(chains=(CHAINS[chain],), layout=layout, num_blocks=num_blocks)
    messages, _ = table.count(make_data(case).routing_maps[1])
    assert messages.flatten(1).shape == (case.size, message_size((CHAINS[chain],), layout, 3))
