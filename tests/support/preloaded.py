"""A process that has imported Megatron once and forks for every test.

Importing takes seconds; a fork of it is as fresh as a new process for what is read afterwards:
arguments, configurations, exits.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

LIMIT_S = 60


class Preloaded:
    """Runs pieces of code, each in a fork of one process that has run `preamble`."""

    def __init__(self, preamble: str, limit_s: int = LIMIT_S, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, preamble, str(limit_s)],
            env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `code` with `sys.argv[1:]` as given."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([code, arguments]) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, "the preloaded process has ended"
        return subprocess.CompletedProcess([code, *arguments], **json.loads(answer))

    def close(self) -> None:
        """End the process; its forks have ended already."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(preamble: str, limit_s: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What Megatron prints while it is imported is no answer.
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(preamble, namespace)
    for line in sys.stdin:
        code, arguments = json.loads(line)
        # Not a TemporaryDirectory: each fork would remove it as it ends.
        folder = Path(tempfile.mkdtemp())
        outputs = [folder / name for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            signal.alarm(limit_s)
            _run_and_exit(code, arguments, outputs, namespace)
        _, status = os.waitpid(child, 0)
        stdout, stderr = (path.read_text() for path in outputs)
        shutil.rmtree(folder)
        answer = {
            "returncode": os.waitstatus_to_exitcode(status),
            "stdout": stdout,
            "stderr": stderr,
        }
        print(json.dumps(answer), file=answers, flush=True)


def _run_and_exit(
    code: str, arguments: list[str], outputs: list[Path], namespace: dict[str, object]
) -> None:
    """Body of a fork: never returns."""
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv[1:] = arguments
    status = 0
    try:
        exec(code, namespace)
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
    _serve(sys.argv[1], int(sys.argv[2]))
