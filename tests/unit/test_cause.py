"""Why a run ended, from what its ranks printed."""

from pathlib import Path

import pytest
import yaml

from monta_megatron.common.torchrun import cause_of, ended

CASES = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text())


@pytest.mark.parametrize("case", CASES)
def test_cause(case: dict[str, str | None]) -> None:
    assert cause_of(str(case["log"]).splitlines()) == case["cause"]


@pytest.mark.parametrize(
    ("status", "text"),
    [(3, "with exit status 3"), (137, "by signal 9 (SIGKILL)"), (255, "with exit status 255")],
)
def test_how_it_ended(status: int, text: str) -> None:
    assert ended(status) == text
