"""`monta completion`: a script that lets bash or zsh complete monta's commands and flags."""

import argparse
from typing import Any

from monta_megatron.common import extras

EXAMPLE = """\
examples:
  monta completion bash > ~/.local/share/bash-completion/completions/monta
  monta completion zsh > ~/.zfunc/_monta    # a folder of $fpath
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "completion",
        help="print a script for the shell's completion",
        description="Print a script by which bash or zsh completes monta's commands, flags and "
        "files. It starts nothing, so it costs a key press nothing.",
        epilog=EXAMPLE,
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise ValueError(
            f"shtab: not installed, must be; {extras.install('completion')}"
        ) from error
    from monta_megatron.cli import build_parser, sub_parsers

    parser = build_parser()
    for command in sub_parsers(parser).values():
        _complete_files(command, shtab)
    print(shtab.complete(parser, shell=parsed.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Make the shell offer what each flag takes, according to its metavar."""
    kinds = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "FOLDER": shtab.DIRECTORY}
    for action in parser._actions:
        if str(action.metavar) in kinds:
            action.complete = kinds[str(action.metavar)]  # type: ignore[attr-defined]
