"""The published rows, their split, and what `benchmarks/validate.py` makes of them."""

import json
from pathlib import Path

import pytest
from published_rows import MOST_TOLERANCE_PCT, read_published
from validate import Checked, Predictor, cluster_of, parser

from monta_megatron.cli import main
from monta_megatron.common import presets

REPOSITORY = Path(__file__).parents[3]
# Past their tolerance; the page docs/plans.md says why.
MISSED = {"D1", "F2", "H3", "layer-mixtral-hybridep"}


@pytest.fixture(scope="module")
def checked() -> list[Checked]:
    return Predictor({}).all_rows()


def test_the_split_is_by_family() -> None:
    """No judged family shares model and cluster with one that constants were fitted on."""
    published = read_published()
    families = published.iterations
    assert sum(len(family.rows) for family in families) >= 20
    places = {
        judged: {
            (family.model, tuple(sorted(map(str, family.changes.items()))), family.cluster)
            for family in families
            if family.judged is judged
        }
        for judged in (True, False)
    }
    assert places[True] and places[False] and not places[True] & places[False]
    for kind in ("iterations", "layers", "bandwidths", "exchanges"):
        for family in getattr(published, kind):
            assert 0 < family.tolerance_pct <= MOST_TOLERANCE_PCT
    ids = [row.id for kind in vars(published).values() for family in kind for row in family.rows]
    assert len(ids) == len(set(ids))


def test_fitting_reads_no_judged_row() -> None:
    rows = Predictor({}).all_rows(judged=False)
    assert rows and not any(row.judged for row in rows)


def test_judged_rows(checked: list[Checked]) -> None:
    judged = sorted(abs(row.error_pct) for row in checked if row.judged)
    assert judged[len(judged) // 2] <= 15
    assert {row.id for row in checked if not row.within} == MISSED


def test_layers_have_the_right_sign(checked: list[Checked]) -> None:
    layers = [row for row in checked if row.kind == "layer"]
    assert len(layers) == 4
    assert all(row.predicted * row.published > 0 for row in layers)


def test_the_calibration_beside_the_rows_is_the_one_of_its_page() -> None:
    copy = presets.FOLDER / "estimate" / "emulated_2x4.yaml"
    original = REPOSITORY / "docs" / "benchmarks" / "regret_2x4.yaml"
    assert copy.read_bytes() == original.read_bytes()
    assert cluster_of("emulated_2x4").kind == "measured"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 as long as a row is past its tolerance, and every row by its fields."""
    assert main(["--json"], parser()) == 1
    document = json.loads(capsys.readouterr().out)
    fields = {
        *("id", "source", "predicted", "published", "unit"),
        *("error_pct", "tolerance_pct", "judged"),
    }
    assert all(fields <= row.keys() for row in document["rows"])
    assert set(document["past_tolerance"]) == MISSED
