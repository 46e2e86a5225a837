"""Run files like the presets, with other values."""

from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "runs" / "quickstart.yaml")
MIXTRAL = str(CONFIGS / "runs" / "mixtral_8x7b.yaml")

# A smaller quickstart: two ranks, EP 2, each on a node of its own.
TWO_RANKS = (
    ("layout", {"nodes": 1, "ranks_per_node": 2, "ep": 2}),
    ("megatron", "moe-monta-ranks-per-node", 1),
    ("megatron", "sequence-parallel", False),
)


def edited(
    folder: Path, *changes: tuple[str, str, Any] | tuple[str, Any], file: str = QUICKSTART
) -> str:
    """A run file with values changed; None leaves a key out."""
    data = yaml.safe_load(Path(file).read_text())
    for name in {"script", "model", "cluster"} & data.keys():
        data[name] = str((CONFIGS / "runs" / data[name]).resolve())
    for *keys, value in changes:
        inner = data
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
        if value is None:
            del inner[keys[-1]]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)
