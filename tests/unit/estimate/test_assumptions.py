"""Constants: which one applies, and that each has a source."""

import sys
from pathlib import Path

import pytest

from monta_megatron.planner.assumptions import (
    Assumption,
    assumptions_of,
    change_of,
    gpu_of,
    read_assumptions,
)

sys.path.append(str(Path(__file__).parents[3] / "scripts"))


def test_the_last_that_fits_is_taken() -> None:
    entries = tuple(
        Assumption(name="rate", value=value, source="a test", where=where)
        for value, where in ((1, None), (2, "EFA"), (3, "H100"))
    )
    for gpu, cluster, value in (("A100", "x", 1), ("A100", "AWS with EFA", 2), ("H100", "EFA", 3)):
        assert assumptions_of(gpu, cluster, entries=entries)["rate"] == value
    # A GPU's text is no part of another one's name.
    assert assumptions_of("GH100", "x", entries=entries)["rate"] == 1


def test_the_gpu_of_a_cluster() -> None:
    assert gpu_of("GB200 NVL72", None) == "GB200"
    assert gpu_of("AWS p5, 8 H100 with EFA", None) == "H100"
    assert gpu_of("mine", "A800") == "A800"
    with pytest.raises(ValueError, match=r"--gpu: not given, must be where the cluster's name"):
        gpu_of("mine", None)
    with pytest.raises(ValueError, match=r"--gpu: got H10, must be one of .*did you mean H100"):
        gpu_of("mine", "H10")


def test_every_gpu_has_all_constants() -> None:
    names = {entry.name for entry in read_assumptions()}
    for gpu in ("A100", "A800", "H100", "H800", "H200", "B200", "GB200", "B300"):
        assert set(assumptions_of(gpu, "any").of) == names
    with pytest.raises(ValueError, match="peak_tflops"):
        assumptions_of("V100", "any", {"peak_tflops": 100})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("gemm_eficiency", 0.5, "did you mean gemm_efficiency?"),
        ("gemm_efficiency", 1.5, "--set gemm_efficiency: value: got 1.5, must be above 0"),
        ("overlap_share", 0, "at most 1"),
    ],
)
def test_a_wrong_change_is_one_line(name: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError) as error:
        assumptions_of("H100", "any", {name: value})
    (line,) = str(error.value).splitlines()
    assert rule in line


def test_changes_are_read() -> None:
    assert change_of("host_layer_us=3e3") == ("host_layer_us", 3000)
    for text in ("host_layer_us", "=3", "a=b", "a=-1", "a=inf"):
        with pytest.raises(ValueError, match="must be NAME=VALUE"):
            change_of(text)


def test_what_is_marked_as_fitted_is_what_the_fit_moves() -> None:
    from fit_estimate import START

    fitted = {(entry.name, entry.where) for entry in read_assumptions() if entry.fitted}
    assert fitted == set(START)
