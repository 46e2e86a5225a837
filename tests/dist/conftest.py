"""Pools of ranks, one per world size, shared by the tests of a file.

Not of the folder: every layout leaves process groups behind, every Gloo group threads, and each of
those wakes up a hundred times a second.
"""

from collections.abc import Iterator

import pytest
from pool import Pool


class Pools:
    """Starts a pool when it is first asked for, and again after a test has broken it."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, world_size: int) -> Pool:
        pool = self._pools.get(world_size)
        if pool is None or not pool.alive:
            pool = self._pools[world_size] = Pool(world_size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
