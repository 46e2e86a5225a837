"""Write a run's directory and start it: under torchrun, srun, or as a job of sbatch.

config.yaml     everything resolved; a run file itself
cluster.yaml    the costs by which the planner chooses, in the run too
plan.json       what the planner expects of the exchange
versions.json   versions, commits, when and how the run was made
run.sh          starts it, under bash or sbatch
start.sh        one process per rank, for run.sh
logs/           the output of the ranks
tuning/         results of the tuning windows, made by the ranks

Only its owner can read it.
"""

import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.files import commit, versions
from monta_megatron.common.text import told_if_slow
from monta_megatron.common.torchrun import why_ended
from monta_megatron.integration.results import FOLDER_VARIABLE
from monta_megatron.tools.launch.prepare import UNRESOLVED, Run, checked, prepare
from monta_megatron.tools.launch.run_config import words_of

START = Path(__file__).with_name("start.sh")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_script(run: Run) -> str:
    """The text of run.sh: Slurm's options, the environment, and start.sh with the script."""
    config, layout = run.config, run.config.layout
    environment = {
        "RUN_DIRECTORY": str(run.directory),
        FOLDER_VARIABLE: str(run.directory / "tuning"),
        # start.sh runs the ranks with this interpreter, whose Megatron has checked the arguments.
        "PYTHON": sys.executable if config.slurm.container is None else "python3",
        **{name: str(value) for name, value in config.environment.items()},
    }
    # Only a dry run leaves the variable unresolved.
    is_unresolved = config.script.startswith(UNRESOLVED)
    script = f'"{config.script}"' if is_unresolved else shlex.quote(config.script)
    options = ("--ranks-per-node", str(layout.ranks_per_node), "--nodes", str(layout.nodes))
    lines = [
        "#!/usr/bin/env bash",
        # sbatch takes a backslash as an escape between quotes too, where bash does not.
        *(f"#SBATCH {shlex.quote(option)}".replace("\\", "\\\\") for option in sbatch_options(run)),
        "#",
        "# Written by `monta launch`. `sbatch run.sh` runs it as a job, `bash run.sh` here or in",
        "# the job of this shell.",
        "set -eo pipefail",
        *config.setup,
        "set -u",
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f"cd {shlex.quote(os.getcwd())}",
        "",
        "arguments=(",
        *(f"    {shlex.join(words)}" for words in run.words),
        ")",
        "",
        'exec bash "$RUN_DIRECTORY/start.sh" \\',
        f"    {shlex.join([*options, *_container_options(run)])} -- \\",
        f'    {script} "${{arguments[@]}}"',
    ]
    return "\n".join(lines) + "\n"


def _container_options(run: Run) -> list[str]:
    """Options of start.sh; the image sees the run's directory."""
    container = run.config.slurm.container
    if container is None:
        return []
    mounts = (f"{run.directory}:{run.directory}", *container.mounts)
    workdir = () if container.workdir is None else ("--container-workdir", container.workdir)
    return ["--container-image", container.image, "--container-mounts", ",".join(mounts), *workdir]


def sbatch_options(run: Run) -> list[str]:
    """Options that sbatch reads from run.sh; start.sh explains the signal.

    One task per node starts the ranks of its node.
    """
    given = {
        "job-name": run.config.name,
        "nodes": run.config.layout.nodes,
        "ntasks-per-node": 1,
        **run.config.slurm.options,
    }
    signal_option = f"--signal=B:USR1@{run.config.slurm.signal_before_seconds}"
    is_requeued = given.pop("requeue", True) and not run.lacks_to_resume
    return [
        *(f"{name}={','.join(values)}" if values else name for name, *values in words_of(given)),
        # sbatch replaces %j and the like in the whole path.
        f"--output={str(run.directory).replace('%', '%%')}/logs/%j.log",
        # A requeued job continues the log that it began.
        "--open-mode=append",
        *([signal_option, "--requeue"] if is_requeued else ["--no-requeue"]),
    ]


def write(run: Run) -> None:
    """Make the run directory: all of it, or nothing.

    Raises:
        OSError: it cannot be written, or exists by now.
    """
    try:
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run.directory.parent, prefix=".") as temporary:
            folder = Path(temporary, run.directory.name)
            _fill(folder, run)
            folder.rename(run.directory)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(run.directory)) from error


def _fill(folder: Path, run: Run) -> None:
    # For its owner alone: configuration and script hold the environment, which may hold secrets.
    folder.mkdir(mode=0o700)
    (folder / "logs").mkdir()
    config = run.config
    if config.cluster is not None:
        shutil.copyfile(files.find_config("clusters", config.cluster), folder / "cluster.yaml")
        config = replace(config, cluster="cluster.yaml")
    (folder / "config.yaml").write_text(strict_yaml.dump(config), encoding="utf-8")
    documents = {"versions": _versions(run)}
    if run.plan is not None:
        documents["plan"] = run.plan.document()
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    script = folder / "run.sh"
    script.write_text(run_script(run), encoding="utf-8")
    script.chmod(0o755)
    shutil.copyfile(START, folder / "start.sh")


def _versions(run: Run) -> dict[str, Any]:
    installed = versions()
    return {
        "versions": installed | {"megatron-core": run.megatron or installed["megatron-core"]},
        "commits": {"monta-megatron": commit(), "script": commit(Path(run.config.script).parent)},
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


Start = Literal["torchrun", "srun", "sbatch", "none"]


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """Result of `monta launch`.

    Attributes:
        run: the run.
        command: command that starts the run; empty if nothing is started.
        exit_status: exit status of the run, or of its submission; None in a dry run.
        job: number of the Slurm job; None where none was submitted.
    """

    run: Run
    command: list[str]
    exit_status: int | None = None
    job: str | None = None

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        started = {"command": self.command, "exit_status": self.exit_status, "job": self.job}
        return {**self.run.document(), **started}

    def text(self) -> str:
        """The script that starts the run."""
        return run_script(self.run).rstrip()


def launch(
    file: str,
    words: Sequence[str],
    *,
    directory: Path | None,
    start: Start | None,
    dry_run: bool,
    force: bool,
    tell: Callable[[str], None],
    output: BinaryIO,
) -> LaunchReport:
    """Prepare a run, write its directory, and start it.

    Args:
        file: the run file, or a preset.
        words: arguments of Megatron, which override those of the file.
        directory: run directory, new or empty; None for runs/NAME.
        start: way to start; None for the default.
        dry_run: whether to write and start nothing.
        force: whether to continue where Megatron's own validation refuses the arguments.
        tell: function that is called with each line for the user.
        output: stream for the output of the ranks.

    Raises:
        UserError: one line; nothing was started.
    """
    # Step 1: check, plan and write.
    with told_if_slow("launch", "still planning"):
        run = prepare(file, words, directory, dry_run)
    start = choose_start(start, run, dry_run)
    with told_if_slow("launch", "still checking the arguments: Megatron is imported for that"):
        run = checked(run, force)
    if start == "sbatch" and run.lacks_to_resume:
        lacks = ", --".join(run.lacks_to_resume)
        run = replace(run, notes=(*run.notes, f"not requeued: would start over without --{lacks}"))
    command = start_command(start, run)
    if not dry_run:
        write(run)
    for line in run.lines():
        tell(line)
    if command:
        tell(f"start: {shlex.join(command)}")
    report = LaunchReport(run=run, command=command)
    if dry_run:
        return report

    # Step 2: start.
    if start == "none":
        return replace(report, exit_status=0)
    if start == "sbatch":
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        return replace(report, exit_status=done.returncode, job=done.stdout.strip() or None)
    path = run.directory / "logs" / "run.log"
    try:
        status, why = run_and_log(command, path, output), ""
    except KeyboardInterrupt as interrupt:
        status, why = 128 + int(interrupt.args[0]), "interrupted; every rank has ended"
    tell(f"log: {path}")
    if status != 0:
        tell(why or f"failed, {why_ended(status, path)}")
    return replace(report, exit_status=status)


def choose_start(given: Start | None, run: Run, dry_run: bool) -> Start:
    """Start of the run: as given, or else by torchrun on one node and by sbatch on several.

    Raises:
        UserError: it cannot be started that way from here.
    """
    nodes = run.config.layout.nodes
    start: Start = given or ("torchrun" if nodes == 1 else "sbatch")
    if start == "torchrun" and nodes > 1:
        raise UserError(
            f"--start: got torchrun, which starts one node, must be srun or sbatch for {nodes}; or "
            "write the run with --start none and, on every node, NODE_RANK=N MASTER_ADDR=HOST bash "
            "run.sh"
        )
    if start in ("srun", "sbatch") and shutil.which(start) is None and not dry_run:
        raise UserError(
            f"--start: {start} not found; on a machine without Slurm `monta launch --start none` "
            "writes the run and starts nothing"
        )
    if start == "srun" and "SLURM_JOB_ID" not in os.environ and not dry_run:
        raise UserError(f"srun needs a job around it: `salloc --nodes {nodes} ...`, or sbatch")
    return start


def start_command(start: Start, run: Run) -> list[str]:
    """The command that starts the run; empty for "none".

    run.sh calls srun itself, so that its own lines run once and outside of a container.
    """
    starter = {"sbatch": ["sbatch", "--parsable"]}.get(start, ["bash"])
    return [] if start == "none" else [*starter, str(run.directory / "run.sh")]


def run_and_log(command: list[str], log: Path, *outputs: BinaryIO) -> int:
    """Run a command to its end; its output goes into `log`, and to `outputs`.

    Returns:
        Its exit status, or 128 + n if signal n has ended it.

    Raises:
        KeyboardInterrupt: on a signal, with its number, after every process of the run has ended.
    """
    # A session of its own: Ctrl-C reaches only this process, which ends the run in order.
    with (
        _handled(_interrupt),
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
            _copy(process, file, *outputs)
            status = process.wait()
        except BaseException:
            # torchrun and srun end all ranks, those that ignore the signal after 30 s.
            process.terminate()
            with _handled(signal.SIG_IGN):
                _copy(process, file)
            raise
    return status if status >= 0 else 128 - status


@contextmanager
def _handled(handler: Callable[[int, Any], object] | signal.Handlers) -> Iterator[None]:
    """Handle `SIGNALS`; for SIGINT too, which shells let background jobs ignore."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _copy(process: "subprocess.Popen[bytes]", *outputs: BinaryIO) -> None:
    """Copy a run's output until the last of its processes has ended."""
    assert process.stdout is not None
    while text := os.read(process.stdout.fileno(), 1 << 16):
        for output in outputs:
            output.write(text)
            output.flush()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)
