"""Ranks to nodes, from what launchers say."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from monta_megatron.common import nodes
from monta_megatron.common.nodes import node_here, number_nodes
from monta_megatron.core import Layout

NODE_NAMES, LAYOUTS = (
    yaml.safe_load(Path(__file__).with_name(name).read_text())
    for name in ("node_names.yaml", "layouts.yaml")
)


@pytest.mark.parametrize("case", NODE_NAMES, ids=str)
def test_names_of_nodes(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nodes.BOOT_ID.is_file()
    monkeypatch.setattr(nodes, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-3")
    if case["boot"] is not None:
        nodes.BOOT_ID.write_text(f"{case['boot']}\n")
    assert node_here(case["variables"]) == case["name"]


def test_nodes_are_numbered_as_they_are_met() -> None:
    assert number_nodes(["b", "b", "a", "c", "a"]) == (0, 0, 1, 2, 1)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_nodes_of_a_layout(case: dict[str, Any]) -> None:
    node_of_rank, etp = tuple(case["nodes"]), case["etp"]
    layout = Layout(
        ep=len(node_of_rank) // etp, etp=etp, num_local_experts=1, rank=0, nodes=node_of_rank
    )
    assert str(case["reason"]) in str(layout.uneven_nodes())
    assert sorted(layout.crossing_groups) == case["crossing"]
