"""Pictures are written whole or not at all."""

from pathlib import Path

import pytest

from monta_megatron.tools import pictures


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    with pictures.figure(path, (2, 1), dpi=50) as figure:
        figure.subplots().plot([1, 2], [3, 4])
    before = path.read_bytes()
    # Width and height as the header holds them.
    assert before.startswith(b"\x89PNG") and before[16:24] == bytes([0, 0, 0, 100, 0, 0, 0, 50])
    with pytest.raises(KeyError), pictures.figure(path, (2, 1)) as figure:
        figure.subplots().plot([1, 2], [3, 4])
        raise KeyError
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
