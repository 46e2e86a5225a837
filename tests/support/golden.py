"""What commands print, kept beside the tests; `pytest --renew` writes it anew for a diff."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES: dict[str, str] = yaml.safe_load(Path(__file__).parents[1].joinpath("rules.yaml").read_text())
# The longest first: some contain others.
NAMES = {rule: name for name, rule in sorted(RULES.items(), key=lambda item: -len(item[1]))}
ANY_RULE = re.compile(rf"({'|'.join(map(re.escape, NAMES))})(?!\w)")

# Set by --renew.
renews = False


def check(path: Path, printed: str) -> None:
    """Compare a text with the file that holds it."""
    if renews:
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8")


def with_named_rules(text: str) -> str:
    """A text in which `{name}` stands for each rule of rules.yaml."""
    return ANY_RULE.sub(lambda match: f"{{{NAMES[match[1]]}}}", text)


def check_lines(path: Path, lines: Mapping[str, str]) -> None:
    """Compare lines, each below its name, with the file that holds them."""
    assert not any("\n" in line for line in lines.values()), lines
    named = (f"{name}\n    {with_named_rules(line)}\n" for name, line in lines.items())
    check(path, "".join(named))


def check_cases(path: Path, answer: Callable[[str], str]) -> None:
    """Compare the answer to each case with a file of both, a case above its answer."""
    cases = path.read_text(encoding="utf-8").splitlines()[::2]
    assert cases, path
    check_lines(path, {case: answer(case) for case in cases})


def check_session(path: Path, answer: Callable[[str], str]) -> None:
    """Compare the answers to commands with a file of both, commands behind `$ monta`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("$ monta")]
    assert commands, path
    answers = {line: with_named_rules(answer(line.removeprefix("$ monta"))) for line in commands}
    check(path, "".join(f"{line}\n{printed}\n" for line, printed in answers.items()))


def refusal(call: Callable[..., object], *args: Any, **fields: Any) -> str:
    """The message of a call that refuses what it is given."""
    with pytest.raises(ValueError) as error:
        call(*args, **fields)
    return str(error.value)
