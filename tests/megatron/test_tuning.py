"""Candidates are tried in Megatron's own trainings: alike on all ranks, to the bits of one chain.

Four CPU ranks, whose exchanges cross nodes; top-2 makes sums of two terms, which have one result in
any order. What ran is checked by train_tuning.py.
"""

from pathlib import Path

import pytest
import yaml
from forked_ranks import ForkedRanks
from test_training import BITWISE, pytestmark, ranks, train

__all__ = ["pytestmark", "ranks"]
SCRIPT = Path(__file__).with_name("train_tuning.py")
SETTINGS = yaml.safe_load(Path(__file__).with_name("tuning_settings.yaml").read_text())


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"resumed"}))
def test_tuning(name: str, ranks: ForkedRanks, tmp_path: Path) -> None:
    train_twice(name, ranks, tmp_path)
    if name == "replicas":
        train_twice("resumed", ranks, tmp_path, checkpoint=tmp_path / "replicas-auto/checkpoint")


def train_twice(
    name: str, ranks: ForkedRanks, folder: Path, checkpoint: Path | None = None
) -> None:
    """Train with `auto` and with one chain, and compare."""
    settings, tuning = SETTINGS[name]
    settings = f"--moe-monta-ranks-per-node 1 {settings}".replace("{checkpoint}", str(checkpoint))
    auto, fixed = (
        train(ranks, "monta", f"{settings} {options}", folder / f"{name}-{kind}", SCRIPT)
        for kind, options in (("auto", tuning), ("fixed", BITWISE))
    )
    # Over chunks a weight's gradient is a sum.
    within = 1e-6 if "overlap-experts" in tuning else 0
    assert auto.losses == pytest.approx(fixed.losses, rel=within, abs=0)
