"""A process that has imported Megatron once and forks for every test.

Importing takes seconds; a fork of it is as fresh as a new process for what is read afterwards:
arguments, configurations, exits. It is sent functions by module and name.
"""

import atexit
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from subprocess import PIPE, CompletedProcess, Popen
from typing import Any

from time_limits import scaled

LIMIT_S = 60


class Preloaded:
    """Calls functions, each in a fork of one process that has imported `modules`."""

    def __init__(self, *modules: str, limit_s: int = LIMIT_S, **environment: str) -> None:
        # What is importable here is importable there.
        own = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
        self._process = Popen(
            [sys.executable, __file__, str(round(scaled(limit_s))), *modules],
            env={**os.environ, **own, **environment},
            stdin=PIPE,
            stdout=PIPE,
        )

    def run(self, function: Callable[..., Any] | str, *args: Any) -> CompletedProcess[str]:
        """Call a function, or "module:function", with `args`, as if it were a program."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        pickle.dump((function, args), stdin)
        stdin.flush()
        return CompletedProcess([function, *args], *pickle.load(stdout))

    def close(self) -> None:
        """End the process; its forks have ended already."""
        self._process.communicate()


def _serve(limit_s: int, modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What Megatron prints while it is imported is no answer.
    for module in modules:
        importlib.import_module(module)
    # Collections would copy the pages that the forks share.
    gc.freeze()
    while sys.stdin.buffer.peek(1):
        function, args = pickle.load(sys.stdin.buffer)
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            child = os.fork()
            if child == 0:
                signal.alarm(limit_s)
                _run_and_exit(function, args, (stdout.fileno(), stderr.fileno()))
            _, status = os.waitpid(child, 0)
            printed = [file.seek(0) or file.read() for file in (stdout, stderr)]
        pickle.dump((os.waitstatus_to_exitcode(status), *printed), answers)
        answers.flush()


def _run_and_exit(
    function: Callable[..., Any], args: tuple[Any, ...], outputs: tuple[int, int]
) -> None:
    """Body of a fork: never returns."""
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
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
    _serve(int(sys.argv[1]), sys.argv[2:])
