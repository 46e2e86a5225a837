"""Where the costs of a training that calibrates itself are kept, and which of them are taken."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.cluster_file import dump_measured, load_cluster

pytest.importorskip("megatron.core", reason="needs megatron-core")
from monta_megatron.integration import self_calibration
from monta_megatron.integration.options import Options

LAYOUT = Layout(ep=2, etp=4, num_local_experts=1, rank=0, nodes=(0,) * 4 + (1,) * 4)
CALIBRATED = Path(__file__).parents[2] / "docs" / "benchmarks" / "regret_2x4.yaml"


def test_the_run_s_folder_comes_before_the_user_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(self_calibration, "hardware_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "cluster_ep2_etp4_rank_8.yaml"
    in_cache = tmp_path / "monta_megatron" / "nvidia_h100_80gb_hbm3_2x4" / name
    arguments = SimpleNamespace(save=None)
    training = SimpleNamespace(get_args=lambda: arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", training)
    assert self_calibration._path(LAYOUT, 8) == in_cache
    arguments.save = str(tmp_path / "run")
    assert self_calibration._path(LAYOUT, 8) == tmp_path / "run" / "monta" / name


def test_what_is_no_whole_file_is_not_taken(tmp_path: Path) -> None:
    path, source = tmp_path / "c.yaml", f"here; measured {self_calibration._today()}"
    assert self_calibration._read(path, "here") is None
    cluster = replace(load_cluster(CALIBRATED), source=source)
    path.write_text(dump_measured(cluster))
    assert self_calibration._read(path, "here") == cluster
    assert self_calibration._read(path, "there") == "measured on here, and here is there"
    path.write_text(path.read_text()[:-20])
    why = self_calibration._read(path, "here")
    assert isinstance(why, str) and why.startswith("no costs of a calibration: ")
    assert str(path) in why and "\n" not in why


def test_starts_alone_are_no_costs() -> None:
    cluster = load_cluster(CALIBRATED)
    assert self_calibration._without_rate(cluster) == ""
    curves = list(cluster.curves)
    at = next(at for at, each in enumerate(curves) if each.resource == "inter")
    curve = curves[at]
    curves[at] = replace(curve, sizes_bytes=curve.sizes_bytes[:2], times_us=(3000.0, 3300.0))
    expected = f"{curve.operation} in {curve.group_size} ranks"
    assert self_calibration._without_rate(replace(cluster, curves=tuple(curves))) == expected


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 10.0),
        ({"deterministic_mode": True}, 0.0),
        ({"moe_monta_calibrate_seconds": 2}, 2.0),
        ({"moe_monta_chain": "alltoall"}, 0.0),
        ({"moe_monta_cluster": "h100_8x_ndr"}, 0.0),
        ({"moe_monta_cluster": "h100_8x_ndr", "moe_monta_calibrate_seconds": 0}, 0.0),
    ],
)
def test_the_time_that_a_training_takes(given: dict[str, object], seconds: float) -> None:
    with mock.patch.object(torch.accelerator, "is_available", lambda: True):
        assert Options.of(SimpleNamespace(**given)).calibrate_seconds == seconds


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"moe_monta_calibrate_seconds": "long"}, r"got 'long', must be a number >= 0; 0 is off"),
        (
            {"moe_monta_calibrate_seconds": 5.0, "moe_monta_cluster": "h100_8x_ndr"},
            "got 5.0, must be 0 or left out beside a cluster file",
        ),
        (
            {"moe_monta_calibrate_seconds": 5.0, "moe_monta_chain": "alltoall"},
            "got 5.0, must be 0 or left out .*, or where a flag or a plan names the chain",
        ),
    ],
)
def test_a_time_that_is_refused(given: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^moe_monta_calibrate_seconds: {rule}"):
        Options.of(SimpleNamespace(**given))


def test_on_cpu_ranks_it_is_off() -> None:
    assert Options.of(SimpleNamespace()).calibrate_seconds == 0
