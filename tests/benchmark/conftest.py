"""Ranks that have imported the benchmark, shared by the tests of this folder that run it."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
from forked_ranks import ForkedRanks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedRanks]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}):
        ranks = ForkedRanks("monta_megatron.tools.bench.point")
    yield ranks
    ranks.close()
