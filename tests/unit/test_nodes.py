"""Ranks to nodes, from what launchers say."""

import socket
from pathlib import Path

import pytest

from monta_megatron.common import ranks
from monta_megatron.common.ranks import node_here, number_nodes
from monta_megatron.core import Layout


def test_names_of_nodes() -> None:
    torchrun_in_slurm = {"GROUP_RANK": "3", "LOCAL_WORLD_SIZE": "8", "SLURM_NODEID": "1"}
    # Several agents of torchrun on a host are of one node.
    boot = ranks.BOOT_ID.read_text().strip()
    here = f"{socket.gethostname()} (boot {boot})"
    assert node_here({}) == node_here(torchrun_in_slurm) == node_here({"GROUP_RANK": "4"}) == here
    # As NCCL does.
    assert node_here({**torchrun_in_slurm, "NCCL_HOSTID": "pod 5"}) == "pod 5"
    # A domain of several hosts, named by the user.
    assert node_here({**torchrun_in_slurm, "MONTA_NODE": "rack 7"}) == "rack 7"


def test_containers_of_one_name_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for boot in ("5f0c", "a117"):
        (tmp_path / boot).write_text(f"{boot}\n")
        monkeypatch.setattr(ranks, "BOOT_ID", tmp_path / boot)
        names.append(node_here({}))
    host = socket.gethostname()
    assert names == [f"{host} (boot 5f0c)", f"{host} (boot a117)"]
    monkeypatch.setattr(ranks, "BOOT_ID", tmp_path / "missing")
    assert node_here({}) == f"{host} (boot unknown)"


def test_nodes_are_numbered_as_they_are_met() -> None:
    assert number_nodes(["b", "b", "a", "c", "a"]) == (0, 0, 1, 2, 1)


@pytest.mark.parametrize(
    ("nodes", "etp", "reason"),
    [
        ((0, 0, 1, 1), 1, None),
        ((0, 0, 0, 0), 1, None),
        ((0, 0, 1), 1, "not evenly in order"),  # EP 3 on nodes of 2
        ((0, 1, 0, 1), 1, "not evenly in order"),  # ranks dealt out in turn
        ((0, 1, 1, 2), 2, "not evenly in order"),  # starts in the middle of a node
        ((0, 1, 2, 3), 2, "spans nodes of 1 rank"),
    ],
)
def test_even_nodes(nodes: tuple[int, ...], etp: int, reason: str | None) -> None:
    ep = len(nodes) // etp
    layout = Layout(ep=ep, etp=etp, num_local_experts=1, rank=0, nodes=nodes)
    found = layout.uneven_nodes()
    assert found is reason if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("nodes", "etp", "crossing"),
    [
        ((0, 0, 1, 1), 1, {"ep", "tp_ep", "rail"}),
        ((0, 0, 1, 1), 2, {"ep", "tp_ep", "rail"}),
        ((0, 0, 0, 1, 1), 1, {"ep", "tp_ep"}),  # five ranks on two nodes have no rails
        ((0, 0, 0, 1, 1, 1), 2, {"ep", "etp", "tp_ep"}),  # the second ETP group lies on both
    ],
)
def test_groups_that_cross_nodes(nodes: tuple[int, ...], etp: int, crossing: set[str]) -> None:
    ep = len(nodes) // etp
    layout = Layout(ep=ep, etp=etp, num_local_experts=1, rank=0, nodes=nodes)
    assert layout.crossing_groups == crossing
