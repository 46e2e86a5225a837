"""Start a run whose directory has been written: under torchrun, srun, or as a job of sbatch."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import BinaryIO, Literal

from monta_megatron.tools.launch.prepare import Run
from monta_megatron.tools.launch.script import slurm_options

Start = Literal["torchrun", "srun", "sbatch", "none"]

# torchrun kills ranks that have not ended 30 s after it was told to end.
GRACE_SECONDS = 60.0


def choose_start(given: Start | None, run: Run, dry_run: bool) -> Start:
    """How the run starts: as given, or else by torchrun on one node and by sbatch on several.

    Raises:
        ValueError: it cannot be started that way from here.
    """
    nodes = run.config.layout.nodes
    start: Start = given or ("torchrun" if nodes == 1 else "sbatch")
    if start == "torchrun" and nodes > 1:
        raise ValueError(
            f"--start: got torchrun, which starts one node, must be srun or sbatch for {nodes}; or "
            "write the run with --start none and, on every node, NODE_RANK=N MASTER_ADDR=HOST bash "
            "run.sh"
        )
    if start in ("srun", "sbatch") and shutil.which(start) is None and not dry_run:
        raise ValueError(
            f"--start: {start} not found; on a machine without Slurm `monta launch --start none` "
            "writes the run and starts nothing"
        )
    return start


def start_command(start: Start, run: Run) -> list[str]:
    """The command that starts the run; empty for "none"."""
    script = str(run.directory / "run.sh")
    if start == "torchrun":
        return ["bash", script]
    if start == "srun":
        options = [
            f"--{name}" if value is None else f"--{name}={value}"
            for name, value in slurm_options(run).items()
        ]
        ranks_as_one = ("--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL")
        return ["srun", *ranks_as_one, *options, "bash", script]
    return ["sbatch", "--parsable", script] if start == "sbatch" else []


def submit(command: list[str]) -> str:
    """Submit a job to Slurm; returns its number.

    Raises:
        ValueError: Slurm does not accept it.
    """
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        words = " ".join(result.stderr.split())
        raise ValueError(f"sbatch: {words}")
    return result.stdout.strip()


def run_and_log(command: list[str], log: Path, output: BinaryIO) -> int:
    """Run a command to its end; its output goes to `output` and into `log`.

    Returns:
        Its exit status, or 128 + n if signal n has ended it.

    Raises:
        KeyboardInterrupt: on a signal, with its number, after every process of the run has ended.
    """
    # Set for SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    # A session of its own: Ctrl-C reaches only this process, which ends the run in order.
    with (
        log.open("ab", buffering=0) as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            _copy(process, file, output)
            status = process.wait()
        except BaseException:
            _end(process, file)
            raise
    return status if status >= 0 else 128 - status


def _copy(process: "subprocess.Popen[bytes]", *outputs: BinaryIO) -> None:
    """Copy a run's output until the last of its processes has ended."""
    assert process.stdout is not None
    while text := os.read(process.stdout.fileno(), 1 << 16):
        for output in outputs:
            output.write(text)
            output.flush()


def _end(process: "subprocess.Popen[bytes]", log: BinaryIO) -> None:
    """Ask a run to end; kill what has not ended in time, or at once when interrupted again."""
    process.terminate()
    deadline = threading.Timer(GRACE_SECONDS, _kill, [process.pid])
    deadline.start()
    try:
        _copy(process, log)
    except KeyboardInterrupt:
        _kill(process.pid)
        _copy(process, log)
    finally:
        deadline.cancel()


def _kill(number: int) -> None:
    for process in (*_descendants(number), number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _descendants(number: int) -> list[int]:
    """All descendants of a process; ranks have their own sessions, so no group holds them all."""
    try:
        text = "".join(path.read_text() for path in Path(f"/proc/{number}/task").glob("*/children"))
    except OSError:
        return []
    children = [int(word) for word in text.split()]
    return [*children, *(descendant for child in children for descendant in _descendants(child))]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)
