"""The preset that stands in for a cluster of which nothing was measured."""

import golden
from clusters import GOLDEN, layout_of

from monta_megatron.planner.cluster_file import uncalibrated


def test_the_nearest_preset_has_the_nodes_of_the_exchange() -> None:
    def answer(case: str) -> str:
        """A case is the ranks of each of two nodes, and their GPU."""
        size, gpu = case.split(" x ")
        layout = layout_of(2 * int(size), 1, int(size), 64)
        cluster = uncalibrated(layout, None if gpu == "CPU rank" else gpu)
        sizes = f"{cluster.num_nodes} x {cluster.ranks_per_node}, {cluster.nics_per_node} NICs"
        return f"{cluster.name}: {sizes}, policy {cluster.policy}"

    golden.check_cases(GOLDEN / "uncalibrated.txt", answer)
