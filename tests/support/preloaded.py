"""A process that has imported Megatron once and forks for every test.

Importing takes seconds; a fork of it is as fresh as a new process for what is read afterwards:
arguments, configurations, exits. It is sent functions by module and name.
"""

import atexit
import importlib
import json
import os
import pickle
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 60


class Preloaded:
    """Calls functions, each in a fork of one process that has imported `modules`."""

    def __init__(self, *modules: str, limit_s: int = LIMIT_S, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(sys.path), str(limit_s), *modules],
            env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, function: Callable[..., Any] | str, *args: Any
    ) -> subprocess.CompletedProcess[str]:
        """Call a function, or "module:function", with `args`, as if it were a program."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(pickle.dumps((function, args)).hex() + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, "the preloaded process has ended"
        return subprocess.CompletedProcess([function, *args], **json.loads(answer))

    def close(self) -> None:
        """End the process; its forks have ended already."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(path: list[str], limit_s: int, modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What Megatron prints while it is imported is no answer.
    # What is importable here is importable there.
    sys.path += [folder for folder in path if folder not in sys.path]
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        function, args = pickle.loads(bytes.fromhex(line))
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
        # Not a TemporaryDirectory: each fork would remove it as it ends.
        folder = Path(tempfile.mkdtemp())
        outputs = [folder / name for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            signal.alarm(limit_s)
            _run_and_exit(function, args, outputs)
        _, status = os.waitpid(child, 0)
        stdout, stderr = (path.read_text() for path in outputs)
        shutil.rmtree(folder)
        answer = {
            "returncode": os.waitstatus_to_exitcode(status),
            "stdout": stdout,
            "stderr": stderr,
        }
        print(json.dumps(answer), file=answers, flush=True)


def _run_and_exit(function: Callable[..., Any], args: tuple[Any, ...], outputs: list[Path]) -> None:
    """Body of a fork: never returns."""
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    status = 0
    try:
        function(*args)
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
