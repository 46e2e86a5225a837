"""A Slurm of two nodes on this machine: its own munge, slurmctld and two slurmd in one folder."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from free_ports import free_ports
from interrupts import processes_with, wait_until
from time_limits import scaled

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
# Seconds; a job takes about 20 where nothing else runs.
JOB_LIMIT_S = 200
START_LIMIT_S = 60
# What outlives SIGTERM for so long, Slurm kills.
KILL_WAIT_S = 10
RUNNING_STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

# Names that resolve, as torchrun has to find the first node: 127.0.0.1 and .2, which start.sh would
# refuse in the usual form. Slurm takes "localhost" for the host.
NODE_NAMES = ("0x7f000001", "0x7f000002")

# Devices that stand for the GPUs of each node; Slurm numbers them, and does not open them.
GPUS = ("/dev/zero", "/dev/full")
GPUS_PER_NODE = len(GPUS)
# Of each node. A job that asks for no memory is given the default.
MEMORY_MB, DEFAULT_MEMORY_MB = 1000, 100

CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")

# Both nodes are this host, and so one node of an exchange, if they are not named.
NAME_HOST = '#!/bin/sh\necho "export NCCL_HOSTID=$SLURMD_NODENAME"\n'


def missing() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    # Debian has the daemons in /usr/sbin, which is not on everybody's PATH.
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install --no-install-recommends {PACKAGES}"
    if os.geteuid() != 0:
        return "slurmd has to be started by root"
    return None


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """Commands on the cluster, with MONTA_CPU_RANKS=1 and `python` the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))},
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "MONTA_CPU_RANKS": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def run(
        self, *command: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command that has ended."""
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )

    def call(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Standard output of a command that has to succeed."""
        done = self.run(*command, cwd=cwd, **environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def daemon(self, *command: str) -> subprocess.Popen[bytes]:
        """A daemon in the foreground; it writes its own log."""
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def idle_nodes(self) -> int:
        """Nodes that answer and have nothing to do; 0 where the controller does not answer yet."""
        command = ("sinfo", "--noheader", "--Node", "--states", "idle", "--format", "%N %t")
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        return done.stdout.count(" idle\n")

    def submit(self, folder: Path, *arguments: str, **environment: str) -> tuple[str, Path]:
        """sbatch ARGUMENTS in `folder`; the job, and its log there."""
        own = ("--parsable", "--output", str(folder / "%j.log"), "--time", "60")
        job = self.call("sbatch", *own, *arguments, cwd=folder, **environment).strip()
        return job, folder / f"{job}.log"

    def state(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S+)", self.call("scontrol", "show", "job", job)))

    def wait_until(self, job: str, happened: Callable[[], bool]) -> None:
        """Wait for what a job does."""
        wait_until(happened, JOB_LIMIT_S, lambda: self.state(job))

    def wait(self, job: str) -> dict[str, str]:
        """The fields of a job that has ended."""
        self.wait_until(job, lambda: self.state(job)["JobState"] not in RUNNING_STATES)
        return self.state(job)

    def complete(self, job: str, log: Path) -> dict[str, str]:
        """The fields of a job that has to end well."""
        fields = self.wait(job)
        ended = fields["JobState"], fields["ExitCode"]
        assert ended == ("COMPLETED", "0:0"), f"{fields}\n{log.read_text()}"
        return fields


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster with both nodes idle; its daemons and its folder end with the context."""
    # Not pytest's folder: the path of a socket is short.
    folder = Path(tempfile.mkdtemp(prefix="monta-slurm-"))
    (folder / "state").mkdir()
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in GPUS))
    text = CONFIGURATION.format(
        memory_mb=MEMORY_MB,
        default_memory_mb=DEFAULT_MEMORY_MB,
        gpus=GPUS_PER_NODE,
        host=socket.gethostname(),
        ports=free_ports(3),
        user=getpass.getuser(),
        folder=folder,
        nodes=NODE_NAMES,
        kill_wait_s=KILL_WAIT_S,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "name_host.sh").write_text(NAME_HOST)
    (folder / "name_host.sh").chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munged = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--socket={folder}/munge.socket", f"--seed-file={folder}/munge.seed"),
        *(f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid"),
    ]
    cluster = Cluster(folder)
    daemons = []

    def logs() -> str:
        return "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))

    try:
        daemons.append(cluster.daemon(*munged))
        wait_until((folder / "munge.socket").exists, START_LIMIT_S, logs)
        daemons.append(cluster.daemon("slurmctld", "-D"))
        daemons += [cluster.daemon("slurmd", "-D", "-N", name) for name in NODE_NAMES]
        wait_until(lambda: cluster.idle_nodes() == len(NODE_NAMES), START_LIMIT_S, logs)
        yield cluster
    finally:
        _end_all(folder)
        for daemon in daemons:
            daemon.wait()
        shutil.rmtree(folder)


def _end_all(folder: Path) -> None:
    """End the daemons and whatever they have started, as nothing of it may be left."""
    ours = {"SLURM_CONF": f"{folder}/slurm.conf"}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes_with(**ours):
            with suppress(ProcessLookupError):
                os.kill(process, number)
        with suppress(AssertionError):
            wait_until(lambda: not processes_with(**ours), KILL_WAIT_S)
