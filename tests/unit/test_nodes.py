"""Ranks to nodes, from what launchers say."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from monta_megatron.common import ranks
from monta_megatron.common.ranks import node_here, number_nodes
from monta_megatron.core import Layout

HOST = socket.gethostname()
TORCHRUN_IN_SLURM = {"GROUP_RANK": "3", "LOCAL_WORLD_SIZE": "8", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("boot", "environment", "name"),
    [
        ("5f0c", {}, f"{HOST} (boot 5f0c)"),
        # Several agents of torchrun on a host are of one node.
        ("5f0c", TORCHRUN_IN_SLURM, f"{HOST} (boot 5f0c)"),
        ("5f0c", {"GROUP_RANK": "4"}, f"{HOST} (boot 5f0c)"),
        # Containers of one name on two hosts.
        ("a117", {}, f"{HOST} (boot a117)"),
        (None, {}, f"{HOST} (boot unknown)"),
        # As NCCL does.
        ("5f0c", {**TORCHRUN_IN_SLURM, "NCCL_HOSTID": "pod 5"}, "pod 5"),
        # A domain of several hosts, named by the user.
        ("5f0c", {**TORCHRUN_IN_SLURM, "MONTA_NODE": "rack 7"}, "rack 7"),
    ],
)
def test_names_of_nodes(
    boot: str | None,
    environment: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ranks.BOOT_ID.is_file()
    monkeypatch.setattr(ranks, "BOOT_ID", tmp_path / "boot_id")
    if boot is not None:
        ranks.BOOT_ID.write_text(f"{boot}\n")
    assert node_here(environment) == name


def test_nodes_are_numbered_as_they_are_met() -> None:
    assert number_nodes(["b", "b", "a", "c", "a"]) == (0, 0, 1, 2, 1)


@pytest.mark.parametrize(
    "case", yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text()), ids=str
)
def test_nodes_of_a_layout(case: dict[str, Any]) -> None:
    nodes, etp = tuple(case["nodes"]), case["etp"]
    layout = Layout(ep=len(nodes) // etp, etp=etp, num_local_experts=1, rank=0, nodes=nodes)
    assert str(case["reason"]) in str(layout.uneven_nodes())
    assert sorted(layout.crossing_groups) == case["crossing"]
