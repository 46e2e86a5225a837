"""Dataclasses from YAML and back; mistakes are in planner/test_malformed_inputs.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monta_megatron.common import strict_yaml
from monta_megatron.common.rules import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Link:
    rate: PositiveFloat
    sizes: tuple[PositiveInt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Links:
    name: str
    links: tuple[Link, ...] = ()
    times: Mapping[str, str | None]
    named: Mapping[str, Link] = field(default_factory=dict)


@pytest.mark.parametrize("text", ["x", "", "010", "0x1f", "4:00:00", "true", "é"])
def test_what_is_written_is_read(tmp_path: Path, text: str) -> None:
    link = Link(rate=1e-5, sizes=(1, 2))
    times = {"a": text, "b": None}
    links = Links(name=text, links=(link,), times=times, named={"c": link})
    path = tmp_path / "links.yaml"
    path.write_text(strict_yaml.dump(links))
    assert strict_yaml.load(Links, path) == links


def test_numbers_and_times_are_what_a_person_means(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text("{name: 010, links: [{rate: 1e3}, {rate: 2}], times: {a: 4:00:00}}")
    found = strict_yaml.load(Links, path)
    assert [link.rate for link in found.links] == [1000.0, 2.0]
    assert (found.name, found.times) == ("010", {"a": "4:00:00"})


def test_a_mistake_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text("name: x\ntimes: {}\nlinks:\n- rate: 1\n- rate: 1\n  sizes: [1,\n  0]\n")
    with pytest.raises(ValueError) as error:
        strict_yaml.load(Links, path)
    assert str(error.value) == f"{path}:7: links[1].sizes[1]: got 0, must be an integer >= 1"
