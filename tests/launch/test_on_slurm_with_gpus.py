"""run.sh on a Slurm that shares out GPUs and memory: what a step is given, and is not."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from slurm_cluster import DEFAULT_MEMORY_MB, MEMORY_MB, Cluster, missing, running_cluster

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.start import start_command

if reason := missing():
    pytest.skip(f"no Slurm: {reason}", allow_module_level=True)

JOB_LIMIT_S = 120
GPUS_PER_NODE = 2
# As the runs of configs/runs ask for them.
ALL_OF_A_NODE = {"gpus-per-node": GPUS_PER_NODE, "exclusive": True, "mem": 0}
MARK = "rank says: "
RANK = f"""
import json, os
given = os.environ.get("SLURM_GPUS_ON_NODE")
os.write(1, f"{MARK}{{json.dumps(given)}}\\n".encode())
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with running_cluster(GPUS_PER_NODE) as cluster:
        yield cluster


@pytest.mark.timeout(JOB_LIMIT_S)
@pytest.mark.parametrize("asks", [True, False], ids=["with", "without"])
def test_a_step_is_given_what_the_run_asks_for(slurm: Cluster, tmp_path: Path, asks: bool) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    data = {
        "name": "with_gpus",
        "script": "rank.py",
        "layout": {"nodes": 2, "ranks_per_node": GPUS_PER_NODE, "ep": 4},
        "slurm": {"time_limit_minutes": 30, "options": ALL_OF_A_NODE if asks else {}},
        "megatron": {"num-experts": 4},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    run = prepare(str(path), [], tmp_path / "run", dry_run=False)
    start.write(run)
    job = slurm.call(*start_command("sbatch", run)).strip()
    fields = slurm.wait(job, JOB_LIMIT_S)
    log = (run.directory / "logs" / f"{job}.log").read_text()
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), log
    said = [json.loads(line.removeprefix(MARK)) for line in log.splitlines() if MARK in line]
    assert said == [str(GPUS_PER_NODE) if asks else None] * 2 * GPUS_PER_NODE
    # Of both nodes.
    resources = fields.get("AllocTRES") or fields["TRES"]
    assert f"mem={2 * (MEMORY_MB if asks else DEFAULT_MEMORY_MB)}M" in resources
