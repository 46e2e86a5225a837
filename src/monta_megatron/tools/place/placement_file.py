"""The file of a placement: which expert comes to each position, layer by layer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monta_megatron.common import files
from monta_megatron.common.files import write_whole

# A thousand layers of a thousand experts take less.
MOST_BYTES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Orders of experts.

    Attributes:
        model: whose experts they are.
        num_experts: E.
        layers: layer, counted from 0 -> [E] the expert that comes to each position.
    """

    model: str
    num_experts: int
    layers: Mapping[int, list[int]]

    def inverse(self) -> "Placement":
        """The placement that undoes this one."""
        layers = {
            layer: sorted(range(self.num_experts), key=order.__getitem__)
            for layer, order in self.layers.items()
        }
        return Placement(model=self.model, num_experts=self.num_experts, layers=layers)


def write_placement(path: Path, document: Mapping[str, Any]) -> None:
    """Write what `monta place --json` prints, one line for each field and layer.

    Raises:
        ValueError: it cannot be written.
    """
    layers = [f'    "{layer}": {order}' for layer, order in document["placement"].items()]
    fields = [
        f'  "{name}": {json.dumps(value)}'
        for name, value in document.items()
        if name != "placement"
    ]
    fields.append('  "placement": {\n' + ",\n".join(layers) + "\n  }")
    write_whole(path, "{\n" + ",\n".join(fields) + "\n}\n")


def read_placement(path: Path) -> Placement:
    """Read a placement.

    Raises:
        ValueError: one line that names file, field and rule.
    """
    document = files.read(path, MOST_BYTES)

    def field(name: str, kind: type, rule: str) -> Any:
        value = document.get(name) if isinstance(document, dict) else None
        if type(value) is not kind or not value:
            raise ValueError(f"{path}: {name}: must be {rule}, in a file of monta place --out")
        return value

    num_experts = field("num_experts", int, "a number of experts")
    layers: dict[int, list[int]] = {}
    for name, order in field("placement", dict, "an order of experts for each layer").items():
        where = f"{path}: placement.{name}"
        if not name.isdecimal():
            raise ValueError(f"{where}: must be the number of a layer, counted from 0")
        if not isinstance(order, list) or any(type(expert) is not int for expert in order):
            raise ValueError(f"{where}: must be a list of experts")
        if sorted(order) != list(range(num_experts)):
            raise ValueError(
                f"{where}: is no permutation, must hold each expert from 0 to {num_experts - 1} "
                f"once; it has {len(order)} entries, {len(set(order))} of them different"
            )
        layers[int(name)] = order
    return Placement(
        model=field("model", str, "the name of a model"), num_experts=num_experts, layers=layers
    )
