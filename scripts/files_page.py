#!/usr/bin/env python
"""Write docs/files.md from the code: the fields of model, cluster, layout and run files.

    python scripts/files_page.py          # print it
    python scripts/files_page.py --write  # into docs/files.md

A test fails if the page differs from what this prints.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from options_page import main, table

from monta_megatron.common.field_texts import field_texts
from monta_megatron.planner.experts import ClusterWithExperts
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.launch.run_config import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "files.md"

INTRODUCTION = """\
# Files

Written by `scripts/files_page.py` from the code; a test keeps it current.

Files are YAML and read strictly: an unknown key, a missing one or a value that breaks its rule is
one line that names the file, the key, the value and the rule, and exit status 2. `monta new model`,
`monta new cluster` and `monta new run` begin one, with these texts as comments.
"""

FILES: dict[str, tuple[type[Any], str]] = {
    "Model": (
        Model,
        "For `--model` and the `model` of a run file. Presets are in `configs/models/`. A\n"
        "`config.json` of Hugging Face takes its place.",
    ),
    "Cluster": (
        ClusterWithExperts,
        "For `--cluster`, `--moe-monta-cluster` and the `cluster` of a run file. Presets are in\n"
        "`configs/clusters/`; `monta calibrate` measures one, whose last line is a `checksum`\n"
        "([calibration.md](calibration.md)).",
    ),
    "Layout": (
        ParallelLayout,
        "For `--layout`. The flags of these names come before it, and `world_size` is that of the\n"
        "cluster where neither gives it.",
    ),
    "Run": (
        RunConfig,
        "For `monta launch --config`. Presets are in `configs/runs/`; its\n"
        "[README](../configs/runs/README.md) says what wins over what.",
    ),
}


def page() -> str:
    """The whole page."""
    sections = [INTRODUCTION]
    head = ("key", "what it says", "unit", "default", "rule")
    for name, (cls, text) in FILES.items():
        sections += [f"## {name}\n", f"{text}\n", table(head, _rows(cls, ""))]
    return "\n".join(sections)


def _rows(cls: type[Any], within: str) -> Iterator[tuple[str, ...]]:
    """A row for each field of a dataclass, and below it those of the dataclass that it holds."""
    for entry in field_texts(cls):
        key = f"{within}{entry.name}"
        yield f"`{key}`", entry.meaning, entry.unit, entry.default, entry.rule
        if entry.inner is not None:
            yield from _rows(entry.inner, f"{key}[]." if "list" in entry.rule else f"{key}.")


if __name__ == "__main__":
    main(page(), PAGE)
