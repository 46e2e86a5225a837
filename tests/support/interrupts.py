"""Processes to interrupt: each leads a group, and its descendants bear a mark."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from time_limits import scaled

LIMIT_S = 120.0
# In the environment of a process and of its descendants.
MARK = "TEST_MARK"


@contextmanager
def started(
    words: Sequence[str], folder: Path, **environment: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A Python that leads a group of its own, and a mark that all its processes bear.

    Args:
        words: its arguments.
        folder: where it runs; "stdout" and "stderr" there are its outputs.
        environment: added to this process's.
    """
    mark = uuid.uuid4().hex
    with (
        (folder / "stdout").open("w") as stdout,
        (folder / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **environment},
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
            # A background job of a shell ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        try:
            yield process, mark
        finally:
            for number in marked(mark):
                os.kill(number, signal.SIGKILL)


def marked(mark: str, **environment: str) -> list[int]:
    """The processes that bear a mark, and such variables."""
    return processes_with(**{MARK: mark, **environment})


def processes_with(**environment: str) -> list[int]:
    """The processes that started with such variables."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items()}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # It has just ended.
            if wanted <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def lines_of(path: Path) -> str:
    """The complete lines of a file, without one that is still being written."""
    return path.read_text().rpartition("\n")[0]


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], bool], stderr: Path) -> None:
    """Wait for a condition while the process runs."""
    deadline = time.monotonic() + scaled(LIMIT_S)
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, stderr.read_text()
        time.sleep(0.02)


def wait_until(
    happened: Callable[[], bool], limit_s: float, state: Callable[[], object] = lambda: None
) -> None:
    """Wait for a condition; the error says the state."""
    deadline = time.monotonic() + scaled(limit_s)
    while not happened():
        assert time.monotonic() < deadline, state()
        time.sleep(0.05)


def interrupt(process: "subprocess.Popen[str]", send: Callable[[int, int], None], mark: str) -> int:
    """The exit status after an interrupt; no process stays."""
    send(process.pid, signal.SIGINT)
    status = process.wait(timeout=scaled(LIMIT_S))
    # A program that an import has started may end a moment later.
    wait_until(lambda: not marked(mark), 2, lambda: marked(mark))
    return status


def network_names() -> str:
    """Named namespaces and interfaces of this machine."""
    names = ["ip", "netns", "list"], ["ip", "-brief", "link", "show"]
    return "".join(subprocess.run(words, capture_output=True, text=True).stdout for words in names)
