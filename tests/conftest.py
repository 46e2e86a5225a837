"""One thread for torch in every test, and commands that run in the process of a test.

Several threads would wait for each other where cores are few; their number is set before torch is
imported, and handed on to the processes that tests start.
"""

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from commands import Monta

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def monta(capsys: pytest.CaptureFixture[str]) -> "Monta":
    from commands import Monta

    return Monta(capsys)
