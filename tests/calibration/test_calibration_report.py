"""What `monta calibrate` prints, and the network interfaces that it finds: worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from monta_megatron.tools.calibrate.interfaces import count_interfaces, nics_of_nodes
from monta_megatron.tools.calibrate.report import lines, nccl_lines

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Curve


def calibrated(num_nodes: int, curve: Curve) -> Cluster:
    """Nodes of 4 GPUs, with one curve beside a rail's, which is not shown."""
    rail = replace(curve, group_size=num_nodes, resource="inter", operation="alltoall")
    return replace(
        load_cluster("h100_8x_ndr"),
        name="by hand",
        num_nodes=num_nodes,
        ranks_per_node=4,
        nics_per_node=2,
        contention=(),
        curves=(rail, curve),
    )


def alltoall(**values: object) -> Curve:
    given: dict[str, object] = {
        **{"operation": "alltoall", "kind": "measured", "source": "by hand"},
        **values,
    }
    return Curve(**given)  # type: ignore[arg-type]


def test_alltoall_between_nodes_as_nccl_tests_counts_it() -> None:
    """A rank of 2 x 4 sends half of its 8 parts over the network: 4 MB of 8, in 1 ms."""
    sizes, times = (4_000_000, 16_000_000), (1000.0, 3200.0)
    curve = alltoall(resource="inter", group_size=8, sizes_bytes=sizes, times_us=times)
    cluster = calibrated(2, curve)
    assert nccl_lines(cluster)[0].splitlines() == [
        "alltoall of 8 ranks",
        "size (B) time (us) algbw (GB/s) busbw (GB/s)",
        " 8000000    1000.0         8.00         7.00",
        "32000000    3200.0        10.00         8.75",
    ]
    assert nccl_lines(cluster)[1:] == [
        "nccl-tests, to compare: srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 "
        "alltoall_perf -b 8000000 -e 32000000 -f 4 -g 1"
    ]
    text = lines(cluster)
    assert text[:2] == ["by hand", "4 ranks and 2 network interfaces on each of 2 nodes"]
    assert set(nccl_lines(cluster)) <= set(text)
    # CPU ranks have no NCCL.
    assert len(nccl_lines(replace(cluster, copies_block_host=True))) == 1


def test_alltoall_of_one_node_as_nccl_tests_counts_it() -> None:
    """A rank of 4 sends 3 of its 4 parts: 3 MB of 4, in 20 us."""
    sizes, times = (3_000_000, 12_000_000), (20.0, 80.0)
    curve = alltoall(resource="intra", group_size=4, sizes_bytes=sizes, times_us=times)
    table, compare = nccl_lines(calibrated(1, curve))
    assert table.splitlines()[2:] == [
        " 4000000      20.0       200.00       150.00",
        "16000000      80.0       200.00       150.00",
    ]
    assert compare.endswith(": alltoall_perf -b 4000000 -e 16000000 -f 4 -g 4")


@pytest.mark.parametrize(
    ("nodes", "found", "number"),
    [
        ([0, 0, 1, 1], "a8 a8 b8 b8", 8),
        # A node of two hosts, as in a rack.
        ([0, 0, 1, 1], "a4 b4 c4 d4", 8),
        ([0, 0], "a4 a4", 4),
        # One node needs none; what its file then says is one for each rank.
        ([0, 0], "a0 a0", 2),
    ],
)
def test_network_interfaces_of_nodes(nodes: list[int], found: str, number: int) -> None:
    assert nics_of_nodes(nodes, [(each[0], int(each[1])) for each in found.split()]) == number


@pytest.mark.parametrize(
    ("nodes", "found", "why"),
    [
        ([0, 0, 1, 1], "a8 a8 b0 b0", r"node 1 shows none that is up \(/sys/class/infiniband and"),
        ([0, 0, 1, 1], "a8 a8 b7 b7", "nodes show different numbers, 7 to 8"),
        ([0, 0, 1, 1], "a8 a8 a8 a8", "several nodes are on one host"),
    ],
)
def test_network_interfaces_that_have_to_be_given(nodes: list[int], found: str, why: str) -> None:
    message = f"^--nics-per-node: not given, must be the interfaces of a node: {why}"
    with pytest.raises(ValueError, match=message):
        nics_of_nodes(nodes, [(each[0], int(each[1])) for each in found.split()])


# Folder below class/infiniband or class/net -> what the files there say.
PORT = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
CARD = {"operstate": "up", "speed": "100000", "device/vendor": "0x15b3"}


def port(name: str, **changes: str) -> dict[str, dict[str, str]]:
    return {f"infiniband/{name}/ports/1": {**PORT, **changes}}


@pytest.mark.parametrize(
    ("folders", "hca", "number"),
    [
        ({}, "", 0),
        # Slower ones are for storage; one that is down, or as fast on another network, is none.
        ({**port("mlx5_0"), **port("mlx5_1"), **port("mlx5_2", rate="200 Gb/sec (2X)")}, "", 2),
        ({**port("mlx5_0"), **port("mlx5_1", state="1: DOWN")}, "", 1),
        ({**port("a0"), **port("a1"), **port("b0", link_layer="Ethernet")}, "", 2),
        # What NCCL is told: by prefixes, by names, or which to leave out.
        ({**port("mlx5_1"), **port("mlx5_10"), **port("mlx4_0")}, "mlx5_1", 2),
        ({**port("mlx5_1"), **port("mlx5_10"), **port("mlx4_0")}, "=mlx5_1:1", 1),
        ({**port("mlx5_1"), **port("mlx5_10"), **port("mlx4_0")}, "^mlx5_1", 1),
        # Cards count where there are no ports; software and what is down do not.
        ({**port("mlx5_0"), "net/eth0": CARD, "net/eth1": CARD}, "", 1),
        (
            {
                "net/eth0": CARD,
                "net/eth1": {**CARD, "speed": "-1"},
                "net/eth2": {**CARD, "operstate": "down"},
                "net/lo": {"operstate": "up", "speed": "100000"},
            },
            "",
            1,
        ),
    ],
)
def test_network_interfaces_of_a_machine(
    folders: dict[str, dict[str, str]],
    hca: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", hca)
    for folder, texts in folders.items():
        for name, text in texts.items():
            path = tmp_path / "class" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    assert count_interfaces(tmp_path) == number
