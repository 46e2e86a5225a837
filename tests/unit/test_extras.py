"""What a message tells pip to install exists, and is what setup.py calls the extra."""

import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest

from monta_megatron.tools import doctor, pictures

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(("extra", "says"), [("plot", pictures.INSTALL), ("te", doctor.INSTALL_TE)])
def test_an_extra_is_what_setup_says(extra: str, says: str) -> None:
    ending = re.compile(rf"""\s*; extra == ["']{extra}["']$""")
    wanted = requires("monta-megatron") or []
    libraries = [ending.sub("", text) for text in wanted if ending.search(text)]
    assert libraries == [says.removeprefix("pip install ").strip("'")]


def test_nothing_tells_pip_to_fetch_a_name_that_no_index_holds() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    by_name = re.compile(r"(pip|uv) +install[^\n`]*\bmonta[-_]megatron\b(?![/\\])")
    texts = {
        name: (REPOSITORY / name).read_text(encoding="utf-8", errors="ignore")
        for name in tracked
        if (REPOSITORY / name).is_file()
    }
    assert len(texts) > 100
    assert [name for name, text in texts.items() if by_name.search(text)] == []
