"""run.sh on a Slurm of two nodes: as a job of sbatch, and as a step of srun."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from slurm_cluster import Cluster, missing, running_cluster

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import Run, prepare
from monta_megatron.tools.launch.start import start_command

if reason := missing():
    pytest.skip(f"no Slurm: {reason}", allow_module_level=True)

JOB_LIMIT_S = 120

# One line in one piece, as ranks share the pipe, and with a mark: torch logs lines in brackets too.
MARK = "rank says: "
RANK = f"""
import json, os, sys
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LEVEL")]
os.write(1, f"{MARK}{{json.dumps([*place, sys.argv[1:]])}}\\n".encode())
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A written run of two nodes with two ranks each."""
    (tmp_path / "rank.py").write_text(RANK)
    data = {
        "name": "on_slurm",
        "script": "rank.py",
        "layout": {"nodes": 2, "ranks_per_node": 2, "ep": 4},
        "slurm": {"time_limit_minutes": 30, "options": {"comment": "two words"}},
        "environment": {"LEVEL": "a b"},
        "megatron": {
            "num-experts": 4,
            "moe-layer-freq": "([1]*2)",
            "save": "checkpoints",
            "load": "checkpoints",
            "exit-signal-handler": True,
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    run = prepare(str(path), [], tmp_path / "run", dry_run=False)
    start.write(run)
    return run


def check_ranks(said: str, run: Run) -> None:
    """Every rank has its place, the environment, and the arguments word by word."""
    lines = sorted(
        json.loads(line.removeprefix(MARK)) for line in said.splitlines() if line.startswith(MARK)
    )
    words = [word for argument in run.arguments.values() for word in argument.words]
    assert "([1]*2)" in words
    assert lines == [[str(rank), "4", "a b", words] for rank in range(4)]


@pytest.mark.timeout(JOB_LIMIT_S)
@pytest.mark.parametrize("environment", [{}, {"SBATCH_EXPORT": "NONE"}], ids=["all", "none"])
def test_sbatch(run: Run, slurm: Cluster, environment: dict[str, str]) -> None:
    """Also where jobs are given nothing of the environment that they are submitted from."""
    job = slurm.call(*start_command("sbatch", run), **environment).strip()
    fields = slurm.wait(job, JOB_LIMIT_S)
    log = run.directory / "logs" / f"{job}.log"
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    assert (fields["NumNodes"], fields["TimeLimit"]) == ("2", "00:30:00")
    assert (fields["JobName"], fields["Requeue"]) == ("on_slurm", "1")
    check_ranks(log.read_text(), run)


@pytest.mark.timeout(JOB_LIMIT_S)
def test_srun(run: Run, slurm: Cluster) -> None:
    check_ranks(slurm.call(*start_command("srun", run)), run)
