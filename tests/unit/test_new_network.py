"""NCCL's environment in the file of `monta new run`: found on this machine, or proposed."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.launch.start import run_script
from monta_megatron.tools.new import hardware

PORT = "class/infiniband/{}/ports/1"
# As the kernel shows GIDs: the address of a port without an IP address, and 10.0.0.1.
LINK_LOCAL, IPV4 = "fe80" + ":0000" * 7, "0000:0000:0000:0000:0000:ffff:0a00:0001"
# Index -> type and GID of a port of RoCE; further rows are empty.
GIDS = {
    0: ("IB/RoCE v1", LINK_LOCAL),
    1: ("RoCE v2", LINK_LOCAL),
    2: ("IB/RoCE v1", IPV4),
    3: ("RoCE v2", IPV4),
    10: ("RoCE v2", IPV4),
}
# The second default route is preferred: its metric is lower. The address of a gateway is a number.
ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth9	00000000	0101000A	0003	0	0	200	00000000	0	0	0
bond0	00000000	0101000A	0003	0	0	100	00000000	0	0	0
eth0	0000000A	00000000	0001	0	0	0	00FFFFFF	0	0	0
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "SYS", tmp_path / "sys")
    monkeypatch.setattr(hardware, "ROUTES", tmp_path / "route")
    (tmp_path / "route").write_text(ROUTES)
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    monkeypatch.chdir(tmp_path)


def add_port(
    device: str,
    link_layer: str,
    rate: int = 200,
    vendor: str = "0x15b3",
    gids: Mapping[int, tuple[str, str]] | None = None,
) -> None:
    port = hardware.SYS / PORT.format(device)
    texts = {
        port / "state": "4: ACTIVE",
        port / "rate": f"{rate} Gb/sec (4X HDR)",
        port / "link_layer": link_layer,
        port.parents[1] / "device" / "vendor": vendor,
    }
    for index, (kind, gid) in (gids or {}).items():
        texts |= {port / f"gids/{index}": gid, port / f"gid_attrs/types/{index}": kind}
    # The type of a GID that is not set cannot be read.
    texts[port / "gids/4"] = "0000" + ":0000" * 7
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def environment(nodes: int = 2) -> tuple[dict[str, object], list[str]]:
    """What the file says for the network, and the names that it proposes."""
    job = f"--model mixtral_8x7b --cluster h100_8x_ndr --nodes {nodes} --tp 1 --ep 8"
    words = ["new", "run", *job.split(), "--ignore-memory", "--force", "--out", "run.yaml"]
    assert main(words) == 0
    given = dict(strict_yaml.load(RunConfig, "run.yaml").environment)
    assert given.pop("PYTORCH_CUDA_ALLOC_CONF")
    text = Path("run.yaml").read_text().partition("\nenvironment:")[2].partition("\nslurm:")[0]
    lines = [line.strip() for line in text.splitlines()]
    return given, [line[1:-1] for line in lines if line.startswith("#") and line.endswith(":")]


def test_roce() -> None:
    for device in ("mlx5_0", "mlx5_1"):
        add_port(device, "Ethernet", gids=GIDS)
    add_port("mlx5_2", "Ethernet", rate=25, gids=GIDS)
    assert environment() == (
        {
            "NCCL_SOCKET_IFNAME": "=bond0",
            "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
            "NCCL_IB_GID_INDEX": 3,
        },
        ["NCCL_IB_TC"],
    )
    text = Path("run.yaml").read_text()
    assert "# RoCE of 200 Gb/s, found on this machine; `show_gids`: the row of RoCE v2" in text
    assert "`mlnx_qos -i INTERFACE`" in text
    script = run_script(prepare("run.yaml", [], None, dry_run=True, ignore_memory=True))
    for line in ("NCCL_SOCKET_IFNAME==bond0", "NCCL_IB_HCA==mlx5_0:1,mlx5_1:1"):
        assert f"export {line}\n" in script
    assert "export NCCL_IB_GID_INDEX=3\n" in script and "NCCL_IB_TC" not in script
    # One node needs none of it.
    assert environment(nodes=1) == ({}, [])


def test_ports_of_roce_that_differ() -> None:
    add_port("mlx5_0", "Ethernet", gids=GIDS)
    add_port("mlx5_1", "Ethernet", gids={5: GIDS[3]})
    given, proposed = environment()
    assert "NCCL_IB_GID_INDEX" not in given
    assert proposed == ["NCCL_IB_GID_INDEX", "NCCL_IB_TC"]
    assert "`show_gids`: the row of RoCE v2" in Path("run.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", "mlx5_0:1 mlx5_1:1 mlx5_10:1"),
        ("mlx5_1", "mlx5_1:1 mlx5_10:1"),
        ("=mlx5_1:1,mlx5_0", "mlx5_0:1 mlx5_1:1"),
        ("mlx5_0:2,mlx5_1:1", "mlx5_1:1 mlx5_10:1"),
        ("^=mlx5_1", "mlx5_0:1 mlx5_10:1"),
        ("^mlx5_1", "mlx5_0:1"),
    ],
)
def test_ports_that_are_not_left_to_nccl(
    text: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1, 10):
        add_port(f"mlx5_{number}", "InfiniBand")
    monkeypatch.setenv("NCCL_IB_HCA", text)
    interfaces = hardware.find_interfaces(hardware.SYS)
    assert interfaces is not None and set(interfaces.names) == set(left.split())


def test_efa() -> None:
    for number in range(4):
        add_port(f"rdmap{number}s0", "Unknown", rate=100, vendor="0x1d0f")
    assert environment() == (
        {"NCCL_SOCKET_IFNAME": "=bond0", "FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": 0},
        ["FI_EFA_USE_DEVICE_RDMA"],
    )


def test_infiniband_needs_nothing_unless_other_ports_are_up() -> None:
    add_port("mlx5_0", "InfiniBand", rate=400)
    add_port("mlx5_1", "InfiniBand", rate=400)
    assert environment() == ({}, [])
    # A port for storage, as fast as the others.
    add_port("mlx5_2", "Ethernet", rate=400, gids=GIDS)
    assert environment() == ({"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}, [])


def test_a_login_node_proposes_all() -> None:
    names = ["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC"]
    names += ["FI_PROVIDER", "FI_EFA_USE_HUGE_PAGE", "FI_EFA_USE_DEVICE_RDMA"]
    assert environment() == ({}, names)
    card = hardware.SYS / "class" / "net" / "eth0"
    (card / "device").mkdir(parents=True)
    (card / "operstate").write_text("up\n")
    (card / "speed").write_text("25000\n")
    assert environment() == ({}, names)


def test_keys_of_sbatch_are_listed() -> None:
    environment()
    asked = Path("run.yaml").read_text().partition("\nslurm:")[2]
    keys = [line.strip() for line in asked.splitlines()]
    for name in ("qos", "reservation", "constraint", "exclude", "gres", "segment"):
        assert f"#{name}:" in keys
    assert {"#partition: null", "#account: null", "time_limit_minutes: 240"} <= set(keys)
    slurm = strict_yaml.load(RunConfig, "run.yaml").slurm
    assert slurm.options == {"gpus-per-node": 8, "exclusive": True, "mem": 0}
