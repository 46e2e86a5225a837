"""`--help` of every command: without heavy imports, with examples that can be copied."""

import json
import re

import pytest
from command_lines import check_arguments
from commands import sub_parsers
from pages import joined_lines
from run_python import run_python

COMMANDS = sorted(sub_parsers())
HEAVY = {"torch", "numpy", "matplotlib", "megatron", "rich", "yaml"}

SHOW = """
import json, sys
from monta_megatron.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    result = run_python("-c", SHOW, *words)
    assert result.returncode == 0, result.stderr
    assert not set(json.loads(result.stderr)) & HEAVY
    if words == ["--help"]:
        assert all(f"\n    {name}" in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_can_be_copied(command: str) -> None:
    text = sub_parsers()[command].description
    assert text is not None
    # Indented, with the lines that a backslash continues them with.
    examples = re.findall(r"^(?:  |example: )\S(?:.*\\\n)*.*", text, re.MULTILINE)
    lines = [line for (line,) in map(joined_lines, examples)]
    assert any(f"{command} " in f"{line} " for line in lines)
    for line in lines:
        check_arguments(line.removeprefix("example: "))
