"""Files are whole or not there (where writing fails, see mistakes/streams.txt); the commit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monta_megatron.common import files
from monta_megatron.common.files import write_whole


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_whole(path, "é\n")
    assert path.read_text(encoding="utf-8") == "é\n"
    write_whole(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="cannot be written: is no regular file"):
            write_whole(path, "x")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe"}


def test_the_commit_is_never_that_of_a_checkout_around_a_wheel(tmp_path: Path) -> None:
    """As in an environment inside of another repository."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    package = tmp_path / "lib" / "python3.12" / "site-packages" / "monta_megatron"
    shutil.copytree(Path(files.__file__).parent, package / "common")
    (package / "__init__.py").touch()
    code = "from monta_megatron.common import files; print(files.commit(), files.commit('.'))"
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    printed = subprocess.check_output(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True
    )
    of_wheel, around = printed.split()
    assert of_wheel == "None" and len(around) == 40
