"""What is handed on: sdist, wheel and its metadata, from an environment that holds nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from published_configs import CONFIGS

from monta_megatron import __version__

REPOSITORY = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
URL = "https://host.example/group/monta-megatron"


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """What a command prints, in a folder and with no more on the path than Python's own."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout


def build(what: str, source: Path, folder: Path, **environment: str) -> Path:
    """What a function of setuptools builds in a new folder."""
    folder.mkdir()
    hook = f"import sys; from setuptools import build_meta; print(build_meta.{what}(sys.argv[1]))"
    printed = run(sys.executable, "-c", hook, folder, folder=source, **environment)
    return folder / printed.split()[-1]


def tracked() -> set[str]:
    """The files of the repository but those whose names begin with a dot."""
    names = run(
        *("git", "ls-files", "--cached", "--others", "--exclude-standard"), folder=REPOSITORY
    )
    files = {name for name in names.splitlines() if (REPOSITORY / name).is_file()}
    return {name for name in files if not name.startswith(".")}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files, because a build leaves folders beside its sources."""
    copy = tmp_path_factory.mktemp("copy")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(copy: Path) -> Path:
    return build("build_sdist", copy, copy / "out")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Made from the sdist, as an index or `python -m build` makes it."""
    folder = sdist.parent / "wheels"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    run(*PIP, "wheel", *options, sdist, folder=sdist.parent)
    (wheel,) = folder.iterdir()
    return wheel


def test_the_sdist_holds_the_repository(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert tracked() - members == set()
    assert {name for name in members if name.endswith((".pyc", ".so"))} == set()


def test_the_wheel_holds_presets_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    presets = {
        f"monta_megatron/{n}" for n in tracked() if re.fullmatch(r"configs/.+\.(yaml|csv)", n)
    }
    assert len(presets) > 20 and presets == {name for name in names if "/configs/" in name}
    modules = {n[4:] for n in tracked() if re.fullmatch(r"src/.+\.(py|sh)", n)}
    assert modules - set(names) == set()
    assert [name for name in names if "test" in name.lower()] == []
    assert [name for name in names if name.endswith("LICENSE")] != []


def test_an_empty_environment_plans(wheel: Path, tmp_path: Path) -> None:
    # Step 1: an environment of its own, with this package, numpy and PyYAML.
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    where = "import site; print(site.getsitepackages()[0])"
    site = Path(run(python, "-c", where, folder=tmp_path).strip())
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    for library in ("numpy", "yaml"):
        spec = find_spec(library)
        assert spec is not None and spec.origin is not None
        # numpy's compiled libraries lie beside it.
        for path in Path(spec.origin).parents[1].glob(f"{library}*"):
            if path.is_dir() and not path.name.endswith("-info"):
                (site / path.name).symlink_to(path)

    # Step 2: from an empty folder it plans by names, and without torch.
    here = tmp_path / "here"
    here.mkdir()
    missing = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert run(python, "-c", missing, folder=here).strip() == "None"
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]))

    def monta(words: str) -> str:
        return run(tmp_path / "venv" / "bin" / "monta", *words.split(), folder=here)

    def plan(words: str) -> dict[str, object]:
        return dict(json.loads(monta(f"plan --cluster h100_8x_ndr {words} --json")))

    assert monta("--version") == f"monta-megatron {__version__}\n"
    planned = plan("--model qwen3_235b_a22b --world-size 128 --tp 2 --ep 16 --pp 4")
    assert planned["chain"] == "hierarchical_alltoall"
    assert plan("--model .. --world-size 16")["chain"] == "alltoall"
    launched = monta("launch mixtral_8x7b --dry-run")
    assert "--moe-token-dispatcher-type monta" in launched
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("url", ["", URL])
def test_links_of_the_metadata(copy: Path, url: str) -> None:
    """None is relative; those to files lead to the release, if it is known where that lies."""
    folder = build(
        "prepare_metadata_for_build_wheel",
        *(copy, copy / f"metadata{len(url)}"),
        MONTA_PROJECT_URL=url and f"{url}/",
    )
    metadata = Parser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))
    description = str(metadata.get_payload())
    assert "# monta-megatron" in description and metadata["License-File"] == "LICENSE"
    links = [entry.split(", ")[1] for entry in metadata.get_all("Project-URL") or []]
    assert len(links) == (4 if url else 0) and all(link.startswith(url) for link in links)
    links += re.findall(r"\]\(([^)]+)\)", description)
    assert [link for link in links if "://" not in link] == []
    release = re.compile(rf"{URL}/(raw|blob)/v{re.escape(__version__)}/([^#]+)")
    files = [found for found in map(release.match, links) if found]
    assert {found[1] for found in files} == ({"raw", "blob"} if url else set())
    assert [found[0] for found in files if not (REPOSITORY / found[2]).exists()] == []


def test_every_file_names_one_version(copy: Path) -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    (first, *_) = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    built = run(sys.executable, "setup.py", "--version", folder=copy).split()[-1]
    assert {str(citation["version"]), first, built} == {__version__}


def test_container_recipes_name_files_that_exist() -> None:
    folder = REPOSITORY / "containers"
    dockerfile = (folder / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)).split()
    recipe = (folder / "apptainer.def").read_text(encoding="utf-8")
    (files,) = re.findall(r"^%files\n(.*?)(?=^%)", recipe, re.MULTILINE | re.DOTALL)
    copied += [line.split()[0] for line in files.strip().splitlines()]
    assert copied and [name for name in copied if not (REPOSITORY / name).exists()] == []
    installs = re.findall(r"pip install .*", dockerfile + recipe)
    assert installs and all("--no-deps" in install for install in installs)
