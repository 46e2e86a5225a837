"""Write a run's directory and start it: under torchrun, srun, or as a job of sbatch.

config.yaml     everything resolved; a run file itself
model.yaml      the model that was planned for; model.json if that is a config.json
cluster.yaml    the costs by which the planner chooses, in the run too
plan.json       what the planner expects of the exchange
versions.json   versions, commits, when and how the run was made
run.sh          starts it, under bash, srun or sbatch
start.sh        one process per rank, for run.sh
logs/           the output of the ranks

Only its owner can read it.
"""

import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.presets import commit, versions
from monta_megatron.common.ranks import why_ended
from monta_megatron.common.text import command_line, quoted
from monta_megatron.tools.launch.log import Summary, summary_of
from monta_megatron.tools.launch.prepare import PRETRAIN_GPT, Run, checked, prepare, to_run_file


def run_script(run: Run) -> str:
    """The text of run.sh: Slurm's options, the environment, and start.sh with the script.

    Raises:
        ValueError: a value is not one line of printable characters.
    """
    layout = run.config.layout
    environment = {
        "RUN_DIRECTORY": str(run.directory),
        # start.sh runs the ranks with this interpreter, whose Megatron has checked the arguments.
        "PYTHON": sys.executable,
        **{name: str(value) for name, value in run.config.environment.items()},
    }
    start = f"--ranks-per-node {layout.ranks_per_node} --nodes {layout.nodes}"
    lines = [
        "#!/usr/bin/env bash",
        *(
            f"#SBATCH --{name}" + ("" if value is None else f"={_quoted_for_sbatch(value)}")
            for name, value in sbatch_options(run).items()
        ),
        *(
            f"##SBATCH --{name}=NAME  # slurm.{name} of the run file"
            for name in ("partition", "account")
            if getattr(run.config.slurm, name) is None
        ),
        "#",
        "# Written by `monta launch`. `bash run.sh` runs it here, `sbatch run.sh` as a job,",
        "# `srun --nodes N --ntasks-per-node 1 bash run.sh` as a step of one.",
        "set -euo pipefail",
        "",
        *(f"export {name}={quoted(value)}" for name, value in environment.items()),
        f"cd {quoted(os.getcwd())}",
        "",
        "arguments=(",
        *(f"    {command_line(argument.words)}" for argument in run.arguments.values()),
        *(f"    {command_line(argument.words)}" for argument in run.script_arguments.values()),
        ")",
        "",
        f'exec bash "$RUN_DIRECTORY/start.sh" {start} -- \\',
        f'    {_script_word(run)} "${{arguments[@]}}"',
    ]
    return "\n".join(lines) + "\n"


def _script_word(run: Run) -> str:
    # Only a dry run leaves the variable unresolved, and bash can still replace it.
    return f'"{PRETRAIN_GPT}"' if run.script == PRETRAIN_GPT else quoted(run.script)


def _quoted_for_sbatch(value: str) -> str:
    # sbatch takes a backslash as an escape between quotes too, where bash does not.
    return quoted(value.replace("\\", "\\\\"))


def sbatch_options(run: Run) -> dict[str, str | None]:
    """Options that sbatch reads from run.sh; start.sh explains the signal."""
    options: dict[str, str | None] = {
        **slurm_options(run),
        # sbatch replaces %j and the like in the whole path.
        "output": f"{str(run.directory).replace('%', '%%')}/logs/%j.log",
        # A requeued job continues the log that it began.
        "open-mode": "append",
    }
    if run.lacks_to_resume:
        return {**options, "no-requeue": None}
    return {
        **options,
        "signal": f"B:USR1@{run.config.slurm.signal_before_seconds}",
        "requeue": None,
    }


def slurm_options(run: Run) -> dict[str, str | None]:
    """The options for both srun and sbatch; None for an option without a value.

    There is one task per node, which starts the ranks of its node.
    """
    slurm, layout = run.config.slurm, run.config.layout
    given = {
        "job-name": run.config.name,
        "nodes": layout.nodes,
        "ntasks-per-node": 1,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time_limit_minutes,
        **slurm.options,
    }
    return {
        name: None if value is True else _text(value)
        for name, value in given.items()
        if value is not None and value is not False
    }


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


START = Path(__file__).with_name("start.sh")


# Megatron's arguments that name a file of ours -> its copy in the run's directory.
COPIED_ARGUMENTS = {"moe-monta-cluster": "cluster.yaml"}


def self_contained(run: Run) -> Run:
    """The run as it reads its files: in its own directory, where `write` copies them."""
    config, megatron = run.config, dict(run.config.megatron)
    # A config.json of Hugging Face stays JSON, which is how it is known.
    names = {"model": "model.yaml", "cluster": "cluster.yaml"}
    if (config.model or "").endswith(".json"):
        names["model"] = "model.json"
    files = {
        names["model"]: config.model,
        "cluster.yaml": megatron.get("moe-monta-cluster") or config.cluster,
    }
    if files["cluster.yaml"]:
        files["cluster.yaml"] = presets.find("clusters", str(files["cluster.yaml"]))
    copies = {name: os.path.abspath(str(file)) for name, file in files.items() if file}
    arguments = {
        name: replace(argument, value=str(run.directory / COPIED_ARGUMENTS[name]))
        if name in COPIED_ARGUMENTS
        else argument
        for name, argument in run.arguments.items()
    }
    # The copies stand beside config.yaml, whose `cluster` is the default of the argument.
    beside: dict[str, Any] = {key: name for key, name in names.items() if name in copies}
    if megatron.get("moe-monta-cluster"):
        del megatron["moe-monta-cluster"]
    return replace(
        run, config=replace(config, **beside, megatron=megatron), arguments=arguments, copies=copies
    )


def write(run: Run) -> None:
    """Make the run directory: all of it, or nothing.

    Raises:
        ValueError: it cannot be written, or exists by now.
    """
    try:
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run.directory.parent, prefix=".") as temporary:
            folder = Path(temporary, run.directory.name)
            _fill(folder, run)
            folder.rename(run.directory)
    except OSError as error:
        raise ValueError(f"{run.directory}: cannot be written: {error.strerror}") from error


def _fill(folder: Path, run: Run) -> None:
    # For its owner alone: configuration and script hold the environment, which may hold secrets.
    folder.mkdir(mode=0o700)
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text(to_run_file(run.config), encoding="utf-8")
    if run.plan is not None:
        text = json.dumps(strict_yaml.plain(run.plan), indent=2)
        (folder / "plan.json").write_text(text + "\n", encoding="utf-8")
    for name, file in run.copies.items():
        try:
            shutil.copyfile(file, folder / name)
        except OSError as error:
            raise ValueError(f"{file}: cannot be copied: {error.strerror}") from error
    (folder / "versions.json").write_text(json.dumps(_versions(run), indent=2) + "\n")
    script = folder / "run.sh"
    script.write_text(run_script(run), encoding="utf-8")
    script.chmod(0o755)
    shutil.copyfile(START, folder / "start.sh")


def _versions(run: Run) -> dict[str, Any]:
    installed = versions()
    return {
        "versions": installed | {"megatron-core": run.megatron or installed["megatron-core"]},
        "commits": {"monta-megatron": commit(), "script": commit(Path(run.script).parent)},
        "arguments_checked": run.megatron is not None,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "copied": dict(run.copies),
        "notes": run.notes,
    }


Start = Literal["torchrun", "srun", "sbatch", "none"]

# torchrun kills ranks that have not ended 30 s after it was told to end.
GRACE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A run to start.

    Attributes:
        file: the run file, or a preset.
        megatron: words of Megatron's arguments, which go before those of the file.
        directory: of the run, new or empty; None for runs/NAME.
        start: how; None for the usual way.
        dry_run: write and start nothing.
        force: go on where Megatron's own validation refuses the arguments.
    """

    file: str
    megatron: Sequence[str]
    directory: Path | None
    start: Start | None
    dry_run: bool
    force: bool


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """Result of `monta launch`.

    Attributes:
        run: the run.
        command: that starts it; empty for none.
        exit_status: of the run, or of its submission; None in a dry run.
        job: number of the job; None where none was submitted.
        summary: of the run that has ended.
    """

    run: Run
    command: list[str]
    exit_status: int | None = None
    job: str | None = None
    summary: Summary | None = None

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        document = {**self.run.document(), "command": self.command}
        if self.job is not None:
            document["job"] = self.job
        if self.summary is not None:
            document["summary"] = self.summary.document()
        if self.exit_status is not None:
            document["exit_status"] = self.exit_status
        return document

    def text(self) -> str:
        """The script that starts the run."""
        return run_script(self.run).rstrip()


def launch(request: LaunchRequest, tell: Callable[[str], None], output: BinaryIO) -> LaunchReport:
    """Prepare a run, write its directory, and start it.

    Args:
        request: the run.
        tell: called with each line for the user.
        output: gets what the ranks print.

    Raises:
        ValueError: one line; nothing was started.
    """
    # Step 1: check and plan.
    run = prepare(request.file, request.megatron, request.directory, request.dry_run)
    start = choose_start(request.start, run, request.dry_run)
    run = self_contained(checked(run, request.force))
    if start == "sbatch" and run.lacks_to_resume:
        note = (
            "the job ends at its time limit and is not requeued, since it would start over "
            f"without --{', --'.join(run.lacks_to_resume)}"
        )
        run = replace(run, notes=(*run.notes, note))
    command = start_command(start, run)
    for line in run.lines():
        tell(line)
    if command:
        tell(f"start: {command_line(command)}")
    report = LaunchReport(run=run, command=command)
    if request.dry_run:
        return report

    # Step 2: write and start.
    write(run)
    if start == "none":
        return replace(report, exit_status=0)
    if start == "sbatch":
        job = submit(command)
        tell(f"submitted job {job}; it writes {run.directory}/logs")
        return replace(report, exit_status=0, job=job)
    interrupted = False
    try:
        status = run_and_log(command, run.directory / "logs" / "run.log", output)
    except KeyboardInterrupt as interrupt:
        interrupted = True
        tell("interrupted; every rank has ended")
        status = 128 + int(interrupt.args[0])
    summary = summary_of(run)
    for line in summary.lines():
        tell(line)
    if status != 0 and not interrupted:
        tell(f"failed, {why_ended(status, Path(summary.log))}")
    return replace(report, exit_status=status, summary=summary)


def choose_start(given: Start | None, run: Run, dry_run: bool) -> Start:
    """Start of the run: as given, or else by torchrun on one node and by sbatch on several.

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
    """Ask a run to end; kill the rest after a time, or at once when interrupted again."""
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
