"""A Slurm of two nodes, shared by all tests of this folder."""

from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, missing, running_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"no Slurm: {reason}")
    with running_cluster() as cluster:
        yield cluster
