"""Models and clusters by name: from a checkout, from a wheel, from wherever one stands."""

from pathlib import Path

import pytest

from monta_megatron.common import files


def test_an_existing_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files.find_config("models", "dbrx") == files.CONFIGS / "models" / "dbrx.yaml"
    # A folder of that name is no model.
    Path("dbrx").mkdir()
    assert files.find_config("models", "dbrx") == files.CONFIGS / "models" / "dbrx.yaml"
    Path("dbrx").rmdir()
    Path("dbrx").write_text("name: mine\n")
    assert files.find_config("models", "dbrx") == Path("dbrx")
    Path("runs").mkdir()
    assert files.find_config("models", "../dbrx", "runs") == Path("runs/../dbrx")
