"""docs/adding_a_chain.md holds code; here it runs, as the page says."""

from collections.abc import Callable, Iterator

import pytest
import worked_chain
from pool import Pools

from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, exchange_of, shape_of_model
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.plan import plan

CONFIGS = worked_chain.PAGE.parents[1] / "configs"

Test = Callable[..., None]


@pytest.fixture
def tests(pools: Pools) -> Iterator[dict[str, Test]]:
    """The page's tests, with its chain known to every process."""
    worked_chain.add()
    pools[4].run(worked_chain.add)
    namespace: dict[str, Test] = {}
    exec(worked_chain.code()[1], namespace)
    yield {name: found for name, found in namespace.items() if name.startswith("test_")}
    worked_chain.remove()
    if pools[4].alive:
        pools[4].run(worked_chain.remove)


def test_the_tests_of_the_page_pass(pools: Pools, tests: dict[str, Test]) -> None:
    tests["test_hand_worked"]()
    tests["test_equals_the_reference"](pools)


def test_the_planner_prices_it(tests: dict[str, Test]) -> None:
    model = load_model(CONFIGS / "models" / "olmoe_1b_7b.yaml")
    cluster = strict_yaml.load(Cluster, CONFIGS / "clusters" / "emulated_2x4_500mbit.yaml")
    place = exchange_of(ParallelLayout(world_size=8, ep=8), model.num_experts, 4)
    chains = ["rail_allgather", "hierarchical_allgather"]
    found = plan(shape_of_model(model, place, 512), cluster, chains=chains, num_chunks=[4])
    bytes_of = {entry.chain: entry.inter_bytes for entry in found.candidates}
    # Top-8 of 64 on 2 nodes: nearly every token goes to both, so they send nearly the same.
    assert bytes_of["rail_allgather"] == pytest.approx(bytes_of["hierarchical_allgather"], rel=0.02)
