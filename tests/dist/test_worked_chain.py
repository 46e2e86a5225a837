"""docs/adding_a_chain.md holds code; here it runs, as the page says, on the ranks of a pool."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool import Pools

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, shape_of_layout
from monta_megatron.planner.model import load_model
from monta_megatron.planner.plan import plan

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "adding_a_chain.md").read_text()
# The page's chain and the page's test.
CHAIN, TEST = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

Test = Callable[..., None]


def add_chain() -> None:
    """What the page says to do in `chains/__init__.py`."""
    namespace: dict[str, object] = {}
    exec(CHAIN, namespace)
    chain = namespace["CHAIN"]
    CHAINS[chain.name] = chain


def remove_chain() -> None:
    """Leave the other tests alone."""
    CHAINS.pop("rail_allgather", None)


@pytest.fixture
def tests(pools: Pools) -> Iterator[dict[str, Test]]:
    """The page's tests, with its chain known to every process."""
    add_chain()
    pools[4].run(add_chain)
    namespace: dict[str, Test] = {}
    exec(TEST, namespace)
    yield {name: found for name, found in namespace.items() if name.startswith("test_")}
    remove_chain()
    if pools[4].alive:
        pools[4].run(remove_chain)


def test_the_tests_of_the_page_pass(pools: Pools, tests: dict[str, Test]) -> None:
    tests["test_hand_worked"]()
    tests["test_equals_the_reference"](pools)


def test_the_planner_prices_it(tests: dict[str, Test]) -> None:
    model = load_model(REPOSITORY / "configs/models/olmoe_1b_7b.yaml")
    cluster = strict_yaml.load(Cluster, REPOSITORY / "configs/clusters/emulated_2x4_500mbit.yaml")
    shape = shape_of_layout(model, ParallelLayout(world_size=8, ep=8), 4, 512)
    chains = ["rail_allgather", "hierarchical_allgather"]
    found = plan(shape, cluster, chains=chains, num_chunks=[4])
    bytes_of = {entry.chain: entry.inter_bytes for entry in found.candidates}
    # Top-8 of 64 on 2 nodes: nearly every token goes to both, so they send nearly the same.
    assert bytes_of["rail_allgather"] == pytest.approx(bytes_of["hierarchical_allgather"], rel=0.02)
