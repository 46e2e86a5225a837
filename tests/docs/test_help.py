"""`--help` of every sub-command: at once, within 80 columns, with examples that can be copied."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest
from command_lines import check_arguments
from pages import joined_lines

from monta_megatron.cli import build_parser, sub_parsers

COMMANDS = sorted(sub_parsers(build_parser()))
HEAVY = {"torch", "numpy", "matplotlib", "megatron", "rich", "yaml"}
LIMIT_S = 0.5

SHOW = """
import json, sys
from monta_megatron.cli import main
try:
    main([*sys.argv[1:], "--help"])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def show_help(*words: str) -> tuple[str, set[str], float]:
    """The text, the modules that were imported, and the seconds of processor time it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", SHOW, *words],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result.stdout, set(json.loads(result.stderr)), cpu_s


@pytest.mark.parametrize("module", ["monta_megatron", "monta_megatron.cli"])
def test_the_package_runs_as_the_command(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("monta-megatron ")


def test_monta_lists_its_commands() -> None:
    text, modules, cpu_s = show_help()
    for command in COMMANDS:
        assert f"\n    {command.split()[0]}" in text
    assert not modules & HEAVY and cpu_s < LIMIT_S
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_there_at_once(command: str) -> None:
    text, modules, cpu_s = show_help(*command.split())
    assert text.startswith(f"usage: monta {command}")
    assert not modules & HEAVY
    # Of the processor: what else the machine does has no part in it.
    assert cpu_s < LIMIT_S
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_can_be_copied(command: str) -> None:
    epilog = sub_parsers(build_parser())[command].epilog
    assert epilog is not None
    # Indented, with the lines that a backslash continues them with.
    examples = re.findall(r"^(?:  |example: )\S(?:.*\\\n)*.*", epilog, re.MULTILINE)
    assert examples
    for (example,) in map(joined_lines, examples):
        assert f"{command} " in f"{example} "
        check_arguments(example.removeprefix("example: "))
