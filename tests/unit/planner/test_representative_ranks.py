"""One rank in place of all that do the same: which they are, and that the plan stays as it is."""

from dataclasses import replace

import pytest
from clusters import layout_of, preset, shape_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monta_megatron.core import Layout, Routing
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import priced_ranks
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing import UniformRouting


class RankByRank(UniformRouting):
    """The same routing, with every rank priced."""

    def is_even(self, num_parts: int) -> bool:
        """Never taken for even."""
        return False


def shown(layout: Layout, routing: Routing) -> dict[int, int]:
    """Rank -> number of ranks that it stands for."""
    return {priced.rank: number for priced, number in priced_ranks(layout, routing)}


H100 = replace(preset("h100_8x_ndr"), ranks_per_node=4, nics_per_node=2)
CLUSTERS = (
    H100,
    replace(H100, nics_per_node=4),
    replace(preset("emulated_2x4_500mbit"), num_nodes=8),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """12 experts on nodes filled from somewhere in the first one on, in turn, or anyhow."""
    ep, etp = draw(st.sampled_from((2, 3, 4, 6, 12))), draw(st.sampled_from((1, 2)))
    ranks, num_nodes, first = range(ep * etp), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    of_rank = st.integers(0, num_nodes - 1)
    nodes = draw(
        st.just([(first + rank) // 4 for rank in ranks])
        | st.just([rank % num_nodes for rank in ranks])
        | st.lists(of_rank, min_size=len(ranks), max_size=len(ranks))
    )
    return replace(layout_of(ep, etp, 4, 12), nodes=tuple(nodes))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layouts(), st.sampled_from(CLUSTERS), st.sampled_from((1, 2, 4)))
def test_the_plan_is_that_of_all_ranks(layout: Layout, cluster: Cluster, num_groups: int) -> None:
    """Top-3; of 4 groups, half of a rank's experts may lie in the next."""
    groups = {"num_groups": num_groups, "group_topk": max(num_groups // 2, 1)}
    shape = replace(shape_of(2, tokens=1000), layout=layout)
    found, expected = (
        plan(
            replace(shape, routing=routing(num_experts=12, topk=3, **groups)),
            cluster,
            num_chunks=(1, 3),
        )
        for routing in (UniformRouting, RankByRank)
    )
    assert (found.chain, found.num_chunks) == (expected.chain, expected.num_chunks)
    # The same sums in another order.
    for name in ("predicted_us", "inter_bytes", "intra_bytes", "peak_bytes"):
        of_one, of_all = (
            [getattr(e, name) or 0 for e in of.candidates] for of in (found, expected)
        )
        assert of_one == pytest.approx(of_all, rel=1e-12)


def test_ranks_that_stand_for_others() -> None:
    even, routing = layout_of(16, 1, 8, 64), UniformRouting(num_experts=64, topk=8)
    assert shown(even, routing) == shown(replace(even, nodes=(0, 1) * 8), routing) == {0: 16}
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
