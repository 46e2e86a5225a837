"""Rates: written with their unit, shown in every plan, and never more between nodes than inside."""

from dataclasses import replace
from pathlib import Path

import pytest
from clusters import CONFIGS, document, link, preset, shape_of

from monta_megatron.common import strict_yaml
from monta_megatron.common.units import Rate
from monta_megatron.planner.cluster import Cluster, Link
from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
from monta_megatron.planner.curves import Curve
from monta_megatron.planner.plan import plan

A800 = preset("a800_2x8_ib200")


@pytest.mark.parametrize(
    ("text", "gbytes_per_s"),
    [
        ("100 Gb/s", 12.5),
        ("12.5 GB/s", 12.5),
        (" 12.5GB/s", 12.5),
        ("500 Mb/s", 0.0625),
        ("62.5 MB/s", 0.0625),
        ("3.35 TB/s", 3350.0),
        ("1.6 Tb/s", 200.0),
        ("800 Kb/s", 1e-4),
        ("1e-3 GB/s", 1e-3),
        ("200 Gbps", 25.0),
        ("200 Gbit/s", 25.0),
        ("200G", 25.0),
    ],
)
def test_bits_and_bytes(text: str, gbytes_per_s: float) -> None:
    rate = Rate.from_text(text)
    assert rate.gbytes_per_s == pytest.approx(gbytes_per_s, rel=1e-15)
    assert Rate.from_text(str(rate)) == rate


@pytest.mark.parametrize("gbytes_per_s", [47.0, 0.03548355340483933, 1e-7, 1 / 3, 3350.0, 1e20])
def test_a_rate_is_written_as_it_is_read(gbytes_per_s: float) -> None:
    assert Rate.from_text(str(Rate(gbytes_per_s))) == Rate(gbytes_per_s)


def test_without_a_unit_a_rate_is_of_a_network() -> None:
    inter, intra = (each for each in A800.links if each.resource != "memory")
    assert replace(link_without_ends(inter), rate=Rate.from_text("200G")).rate == Rate(25.0)
    with pytest.raises(ValueError, match=r"rate: got 112.5 GB/s .* must be a rate with its unit"):
        replace(link_without_ends(intra), rate=Rate.from_text("900G"))


def link_without_ends(one: Link) -> Link:
    return replace(one, conservative_rate=None, optimistic_rate=None)


@pytest.mark.parametrize(
    ("rates", "nics", "message"),
    [
        # 4 interfaces for 8 ranks: each rank's share is below the node link's rate.
        ((200.0, 450.0), 4, r"200 GB/s \(1,600 Gb/s\) .* at most 100 GB/s \(800 Gb/s\)"),
        ((100.0, 50.0), 8, r"the network has 100 GB/s \(800 Gb/s\) for each rank"),
        ((100.0, 50.0), 4, None),
    ],
)
def test_bits_taken_for_bytes_are_refused_in_a_file(
    rates: tuple[float, float], nics: int, message: str | None, tmp_path: Path
) -> None:
    links = (link("inter", 1.0, rates[0]), link("intra", 1.0, rates[1]), link("memory", 1.0, 1e3))
    path = tmp_path / "cluster.yaml"
    path.write_text(strict_yaml.dump(replace(A800, nics_per_node=nics, links=links)))
    if message is None:
        load_cluster(path)
        return
    with pytest.raises(ValueError, match=message):
        load_cluster(path)


def test_100_gigabits_are_an_eighth_of_100_gigabytes(tmp_path: Path) -> None:
    found = []
    for number, text in enumerate(("100 Gb/s", "12.5 GB/s", "100 GB/s")):
        path = tmp_path / f"{number}.yaml"
        preset_file = CONFIGS / "clusters" / "a800_2x8_ib200.yaml"
        lines = preset_file.read_text().replace(" rate: 22 GB/s", f" rate: {text}").splitlines()
        # Ends are those of the rate that was there.
        kept = [line for line in lines if "conservative_" not in line and "optimistic_" not in line]
        path.write_text("\n".join(kept))
        cluster = strict_yaml.load(Cluster, path)
        found.append(cluster.time_us("alltoall", "inter", 1e9).us - 30)
    assert found == pytest.approx([80_000, 80_000, 10_000])


def test_every_plan_shows_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "olmoe_1b_7b", "--cluster", "h100_8x_ndr", "--world-size", "8"]
    for flags in (["--ep", "8"], []):
        rates = document(capsys, *command, *flags)["rates"]
        assert [(each["resource"], each["rate"]) for each in rates] == [
            ("inter", "47 GB/s"),
            ("intra", "335 GB/s"),
            ("memory", "2475 GB/s"),
        ]


def test_a_measured_rate_is_that_of_the_largest_size() -> None:
    curve = Curve(
        operation="alltoall",
        resource="inter",
        group_size=8,
        sizes_bytes=(1_000, 2_000_000),
        times_us=(40.0, 1_000.0),
        kind="measured",
        source="by hand",
    )
    network, *_ = plan(shape_of(16), replace(A800, curves=(curve,))).rates
    assert network.rate == Rate(2.0)
    assert network.basis == "per rank in alltoall of 8 ranks at 2,000,000 bytes, measured"


def test_a_ratio_may_ask_for_a_network_faster_than_the_node_link() -> None:
    assert with_inter_rate(A800, 100).time_us("alltoall", "inter", 1e6).us < 31


def test_nodes_filled_in_part_and_uneven_interfaces_are_said() -> None:
    shared = replace(A800, nics_per_node=3)
    assert A800.notes_on(8) == A800.notes_on(16) == shared.notes_on(8) == ()
    assert A800.notes_on(12) == ("12 ranks leave 4 of the 8 ranks of a node unused",)
    (note,) = shared.notes_on(16)
    assert note.startswith("3 interfaces cannot be shared evenly by the 8 ranks of a node")
