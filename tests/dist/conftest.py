"""Pools of ranks, one per world size, shared by all tests of this folder."""

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


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
