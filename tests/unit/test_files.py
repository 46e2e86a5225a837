"""Files are whole or not there; where writing fails, see mistakes/streams.txt."""

import os
from pathlib import Path

import pytest

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
