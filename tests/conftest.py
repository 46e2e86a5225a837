"""One thread for torch in every test, and commands that run in the process of a test.

Several threads would wait for each other where cores are few; their number is set before torch is
imported, and handed on to the processes that tests start, which keep freed memory too, as ranks of
an emulated cluster do.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import golden
import pytest
import sitecustomize  # noqa: F401 - this interpreter collects rarely too

from monta_megatron.emulation.emulator import KEEP_FREED_MEMORY

if TYPE_CHECKING:
    from commands import Monta
    from forked_ranks import ForkedRanks

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(KEEP_FREED_MEMORY)
# Not sitecustomize's own path: a distribution's Python may already have imported another one.
STARTUP = str(Path(__file__).parent / "support" / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, os.environ.get("PYTHONPATH", "")]).rstrip(":")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write golden files anew, for a diff")


def pytest_configure(config: pytest.Config) -> None:
    golden.renews = config.getoption("renew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the time limit of each test, unless the command line gives one for all."""
    from time_limits import scaled

    if config.getoption("timeout") is not None or config.getoption("collectonly"):
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = float(config.getini("timeout") if marker is None else marker.args[0])
        # The closest one holds.
        item.add_marker(pytest.mark.timeout(scaled(limit_s)), append=False)


@pytest.fixture
def monta(capsys: pytest.CaptureFixture[str]) -> "Monta":
    from commands import Monta

    return Monta(capsys)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ForkedRanks]":
    """Ranks that have imported the benchmark."""
    from forked_ranks import ForkedRanks

    cache = str(tmp_path_factory.mktemp("cache"))
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}):
        ranks = ForkedRanks("monta_megatron.tools.bench.measure")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    from fake_world import fake_world

    with fake_world():
        yield
