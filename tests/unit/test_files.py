"""Files are whole or not there, and keep their mode."""

import os
import stat
from pathlib import Path

import pytest

from monta_megatron.common.files import write_whole


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_that_any_has(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_whole(tmp_path / "plan.yaml", "é\n")
    assert (tmp_path / "plan.yaml").read_text(encoding="utf-8") == "é\n"
    assert mode_of(tmp_path / "plan.yaml") == mode_of(tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"plan.yaml", "other"}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o444])
def test_an_existing_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("before")
    path.chmod(mode)
    write_whole(path, b"after")
    assert (path.read_bytes(), mode_of(path)) == (b"after", mode)


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="cannot be written: is no regular file"):
            write_whole(path, "x")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe"}


def test_nothing_is_left_of_a_file_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        write_whole(tmp_path / "plan.yaml", "x")
    assert list(tmp_path.iterdir()) == []
