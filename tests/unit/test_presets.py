"""Models, clusters and runs by name: from a checkout, from a wheel, from wherever one stands."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from monta_megatron.common import presets
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.model import load_model

REPOSITORY = Path(__file__).parents[2]


def run(folder: Path, *words: str, path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.timeout(240)
def test_a_wheel_plans_by_names(tmp_path: Path) -> None:
    # Step 1: build from a copy, because a build leaves folders beside its sources.
    copy, wheels, site, here = (tmp_path / name for name in ("copy", "wheels", "site", "here"))
    here.mkdir()
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("src", "configs"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignore)
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    built = run(
        copy,
        *(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), "."),
        path=tmp_path,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.iterdir()

    # Step 2: it holds every preset, and nothing of the tests.
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"monta_megatron/{path.relative_to(REPOSITORY)}"
        for path in (REPOSITORY / "configs").glob("*/*.yaml")
    }
    assert len(expected) > 20
    assert expected == {name for name in names if "/configs/" in name}
    assert [name for name in names if "test" in name.lower()] == []

    # Step 3: installed, it finds them by name from an empty folder.
    installed = run(here, *pip, "install", "--no-deps", f"--target={site}", str(wheel), path=copy)
    assert installed.returncode == 0, installed.stderr
    shutil.rmtree(copy)
    monta = ("-m", "monta_megatron")
    named = ("--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr")
    sizes = ("--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4", "--json")
    where = run(
        here, "-c", "import monta_megatron; print(monta_megatron.__file__)", path=site
    ).stdout
    assert Path(where.strip()).is_relative_to(site)
    planned = run(here, *monta, "plan", *named, *sizes, path=site)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["chain"] == "hierarchical_alltoall"
    launched = run(here, *monta, "launch", "--config", "mixtral_8x7b", "--dry-run", path=site)
    assert launched.returncode == 0, launched.stderr
    assert "--moe-token-dispatcher-type monta" in launched.stdout


def test_an_existing_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert presets.find("models", "dbrx") == presets.FOLDER / "models" / "dbrx.yaml"
    # A folder of that name is no model.
    Path("dbrx").mkdir()
    assert presets.find("models", "dbrx") == presets.FOLDER / "models" / "dbrx.yaml"
    Path("dbrx").rmdir()
    Path("dbrx").write_text("name: mine\n")
    assert presets.find("models", "dbrx") == Path("dbrx")
    Path("runs").mkdir()
    assert presets.find("models", "../dbrx", "runs") == Path("runs/../dbrx")


def test_all_load_by_name() -> None:
    for kind, load in (("models", load_model), ("clusters", load_cluster)):
        for path in (presets.FOLDER / kind).glob("*.yaml"):
            assert load(path.stem) == load(path)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("mixtral_8x7", "did you mean mixtral_8x7b?"),
        ("configs/models/mixtral-8x7b.yaml", "did you mean mixtral_8x7b?"),
        ("unheard_of", "known: dbrx, deepseek_v2_lite, "),
    ],
)
def test_an_unknown_name_is_one_line(given: str, advice: str) -> None:
    with pytest.raises(ValueError) as error:
        load_model(given)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{given}: cannot be read: No such file or directory, nor a preset; ")
    assert advice in line
