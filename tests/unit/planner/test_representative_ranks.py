"""One rank in place of all that do the same: which they are, and that the plan stays as it is."""

from dataclasses import dataclass, replace

import pytest
from clusters import layout_of, preset, shape_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monta_megatron.core import Layout, Routing, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import priced_ranks
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing.drawn import skewed_routing
from monta_megatron.planner.routing.expected import UniformRouting


class RankByRank(UniformRouting):
    """The same routing, with every rank priced."""

    def is_even(self, num_parts: int) -> bool:
        """Never taken for even."""
        return False


def shown(layout: Layout, routing: Routing) -> dict[int, int]:
    """Rank -> number of ranks that it stands for."""
    return {priced.rank: number for priced, number in priced_ranks(layout, routing)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small exchange; the nodes may have any number of its ranks, in any order."""

    ep: int
    etp: int
    nodes: tuple[int, ...]
    num_groups: int
    cluster: Cluster

    def shape(self, rank_by_rank: bool) -> Shape:
        """12 experts, of which each token picks 3, in half of the groups."""
        routing = (RankByRank if rank_by_rank else UniformRouting)(
            num_experts=12,
            topk=3,
            num_groups=self.num_groups,
            group_topk=max(self.num_groups // 2, 1),
        )
        found = shape_of(self.ep, self.etp, num_experts=12, tokens=1000, routing=routing)
        return replace(found, layout=replace(found.layout, nodes=self.nodes))


H100 = replace(preset("h100_8x_ndr"), ranks_per_node=4, nics_per_node=2)
CLUSTERS = (
    replace(H100, nics_per_node=4),
    H100,
    replace(H100, nics_per_node=1),
    # Copies on the host, and curves.
    preset("emulated_2x4_500mbit"),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Nodes filled from somewhere in the first one on, in turn, or anyhow."""
    ep, etp = draw(st.sampled_from([2, 3, 4, 6])), draw(st.sampled_from([1, 2]))
    ranks = range(ep * etp)
    first, num_nodes = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    anyhow = st.lists(st.integers(0, num_nodes - 1), min_size=len(ranks), max_size=len(ranks))
    nodes = draw(
        st.one_of(
            st.just([(first + rank) // 4 for rank in ranks]),
            st.just([rank % num_nodes for rank in ranks]),
            anyhow,
        )
    )
    return Case(
        ep=ep,
        etp=etp,
        nodes=tuple(nodes),
        # Of 4 groups, half of an EP rank's experts may lie in the next group.
        num_groups=draw(st.sampled_from([1, 2, 4])),
        cluster=draw(st.sampled_from(CLUSTERS)),
    )


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@example(Case(ep=3, etp=1, nodes=(0, 1, 2), num_groups=4, cluster=H100))
@example(Case(ep=12, etp=1, nodes=(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), num_groups=4, cluster=H100))
@given(cases())
def test_the_plan_is_that_of_all_ranks(case: Case) -> None:
    found, expected = (
        plan(case.shape(rank_by_rank), case.cluster, num_chunks=(1, 3))
        for rank_by_rank in (False, True)
    )
    assert (found.chain, found.num_chunks) == (expected.chain, expected.num_chunks)
    assert (found.key, found.notes) == (expected.key, expected.notes)
    numbers, expected_numbers = (
        {
            (entry.chain, entry.num_chunks, name): getattr(entry, name) or 0.0
            for entry in each.candidates
            for name in (
                "predicted_us",
                "inter_bytes",
                "intra_bytes",
                "peak_bytes",
            )
        }
        for each in (found, expected)
    )
    # The same sums in another order.
    assert numbers == pytest.approx(expected_numbers, rel=1e-12)


def test_ranks_that_stand_for_others() -> None:
    even, routing = layout_of(16, 1, 8, 64), UniformRouting(num_experts=64, topk=8)
    assert shown(even, routing) == shown(replace(even, nodes=(0, 1) * 8), routing) == {0: 16}
    # Nobody knows what a sample holds.
    assert shown(even, skewed_routing(64, 8)) == dict.fromkeys(range(16), 1)
    # EP 12 on nodes of 4 from the third rank of a node on: 2, 4, 4 and 2 ranks.
    layout = replace(layout_of(12, 1, 4, 12), nodes=(0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3))
    assert shown(layout, UniformRouting(num_experts=12, topk=2)) == {0: 4, 2: 8}
    # EP 3, ETP 2, nodes of 3: ranks 0 1 | 2 3 | 4 5 are ETP groups, 0 2 4 | 1 3 5 EP groups. Rank 0
    # has both peers on its node, rank 1 that of ETP, rank 2 that of EP.
    layout = Layout(ep=3, etp=2, num_local_experts=1, rank=0, nodes=(0, 0, 0, 1, 1, 1))
    assert shown(layout, UniformRouting(num_experts=3, topk=1)) == {0: 2, 1: 2, 2: 2}
    # Of 3 ranks with 4 experts each, the second one's lie in two groups evenly.
    routing = UniformRouting(num_experts=12, topk=3, num_groups=4, group_topk=2)
    assert len(shown(layout_of(3, 1, 3, 12), routing)) == 3
    assert len(shown(layout_of(4, 1, 4, 12), routing)) == 1
