#!/usr/bin/env python
"""Write docs/options.md from the code: Megatron arguments, variables, flags of every sub-command.

    python scripts/options_page.py          # print it
    python scripts/options_page.py --write  # into docs/options.md

A test fails if the page differs from what this prints.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from monta_megatron.cli import build_parser, sub_parsers
from monta_megatron.integration.options import OptionFields

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
# Flag, value, meaning.
Row = tuple[str, str, str]

INTRODUCTION = """\
# Options

Written by `scripts/options_page.py` from the code; a test keeps it current.

Where the same thing is said twice, the command line wins over a variable, and a variable over a
cluster file or a default. What a run file of `monta launch` says becomes command line. What is out
of range is refused with one line and exit status 2.
"""

VARIABLES = {
    "MONTA_AUTOLOAD": "0: PyTorch's autoload does not start the hook that makes Megatron know "
    "`monta`; call `monta_megatron.register()` instead",
    "MONTA_CPU_RANKS": "1: Megatron runs on CPU ranks (Gloo), in any script; `monta emulate` "
    "sets it",
    "MONTA_ALLOW_ANY_MEGATRON": "1: go on with a Megatron-Core outside the supported range",
    "MONTA_NODE": "a name that the ranks joined by the node link share, where nodes differ in size "
    "or are no hosts; comes before the cluster file, not before `--moe-monta-ranks-per-node`",
    "MONTA_EMULATED_CLUSTER": "set by `monta emulate` for every rank: the cluster, as JSON",
    "MONTA_PYTHON": "interpreter from which the scripts make their environment",
    "MONTA_VENV": "that environment's folder (default: `.venv` in the repository)",
    "MEGATRON_LM_DIR": "checkout of Megatron-LM whose `pretrain_gpt.py` the tests train with",
}

READ_VARIABLES = {
    "RANK, WORLD_SIZE, LOCAL_RANK": "torchrun; without them SLURM_PROCID, SLURM_NTASKS and "
    "SLURM_LOCALID of srun, which then needs MASTER_ADDR",
    "LOCAL_WORLD_SIZE": "torchrun: ranks per node; under srun SLURM_NTASKS_PER_NODE",
    "NCCL_HOSTID": "NCCL: the name of this rank's host, in place of the host's own and its boot; a "
    "host is a node unless something else says so",
    "CUDA_DEVICE_MAX_CONNECTIONS": "Megatron demands 1 before Blackwell for TP or CP > 1, with "
    "exceptions; `monta doctor` says what it costs",
    "NCCL_MAX_CTAS": "NCCL: comes before the budgets of rails and nodes, for all communicators",
    "NCCL_IB_HCA": "NCCL: the ports of InfiniBand and RoCE that it takes; `monta calibrate` and "
    "`monta new` count those",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "NCCL >= 2.26: 1 keeps concurrent communicators from deadlock",
}


def page() -> str:
    """The whole page."""
    parsers = sub_parsers(build_parser())
    flags = {name: _flags(parser) for name, parser in parsers.items()}
    count = Counter(row for rows in flags.values() for row in rows)
    # Of a flag that some commands explain otherwise, the row that most of them have.
    common = {row[0]: row for row, commands in reversed(count.most_common()) if commands > 1}
    shared = [row for row in count if common.get(row[0]) == row]
    about = [
        (f"`monta {name}`", parser.description or "", _also(flags[name], shared))
        for name, parser in parsers.items()
    ]
    own = [
        (f"`{command}`", _name(row, required), *row[1:])
        for command, rows in flags.items()
        for row, required in rows.items()
        if row not in shared
    ]
    sections = [
        *(INTRODUCTION, *_megatron_arguments(), *_variables()),
        "## Commands\n",
        table(("command", "what it does", "flags that others have, too"), about),
        "## Flags of several commands\n",
        table(("flag", "value", "what it says"), shared),
        "## Flags of one command\n",
        table(("command", "flag", "value", "what it says"), own),
    ]
    return "\n".join(sections)


def _megatron_arguments() -> list[str]:
    rows = []
    for entry in fields(OptionFields):
        flag = "--" + entry.name.replace("_", "-")
        text = entry.metadata["argparse_meta"]["help"]
        rows.append((f"`{flag}`", f"`{entry.name.upper()}`", text))
    return [
        "## Megatron arguments\n",
        "Fields of `TransformerConfig`, so arguments of every Megatron script where this package\n"
        "is installed, beside `--moe-token-dispatcher-type monta`. The variable is the argument's "
        "default.\n",
        table(("argument", "variable", "what it says"), rows),
    ]


def _variables() -> list[str]:
    return [
        "## Environment variables\n",
        "Our own, then those of others that are read.\n",
        table(("variable", "what it says"), _quoted({**VARIABLES, **READ_VARIABLES})),
    ]


def _flags(parser: argparse.ArgumentParser) -> dict[Row, bool]:
    """The flags of a command, and whether each is required."""
    return {
        (_flag(action), _value(action), _help(parser, action)): bool(
            action.required and action.option_strings
        )
        for action in parser._actions
        if action.dest != "help" and action.help != argparse.SUPPRESS
    }


def _also(flags: Mapping[Row, bool], shared: Collection[Row]) -> str:
    """The flags of a command that others have, too."""
    return ", ".join(_name(row, required) for row, required in flags.items() if row in shared)


def _name(row: Row, required: bool) -> str:
    return f"{row[0]} (required)" if required else row[0]


def _flag(action: argparse.Action) -> str:
    return ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return ", ".join(f"`{value}`" for value in action.choices)
    if action.nargs == 0:
        return ""
    return f"`{action.metavar}`" if isinstance(action.metavar, str) else ""


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def _quoted(rows: dict[str, str]) -> Iterable[tuple[str, str]]:
    return [
        (", ".join(f"`{name}`" for name in names.split(", ")), text) for names, text in rows.items()
    ]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def main(text: str, path: Path) -> None:
    """Print a page, or write it."""
    if sys.argv[1:] == ["--write"]:
        path.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main(page(), PAGE)
