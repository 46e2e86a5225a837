"""Pools of ranks, one per world size, shared by all tests of this folder."""

from collections.abc import Iterator

import pytest
from pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
