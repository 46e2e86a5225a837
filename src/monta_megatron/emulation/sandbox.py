"""Private namespaces: everything made inside them is gone when their first process ends.

A command gets network, mount and process namespaces of its own. Names under /run/netns, interfaces,
bridges and mounts are then visible to it alone, need no unique names, and are removed by the kernel
when it ends, with every process that it started. That holds after a failure or a signal as well as
after an ordinary end, so nothing has to be cleaned up, now or by a later start.

The command's standard input is a lifeline: it ends when this process does, even by SIGKILL, and the
command then has to end as well (`end_with_standard_input`).
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence

# Folders with commands that may be missing from the PATH of a user who is not root.
_SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"

_ADVICE = (
    "run as root, in a container with --privileged, or allow user namespaces (sysctl "
    "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}


def run(command: Sequence[str]) -> int:
    """Run a command in private namespaces; returns its exit status, or 128 + n for signal n.

    Raises:
        ValueError: the namespaces cannot be made here.
        KeyboardInterrupt: on an interrupt, after everything inside has ended.
    """
    unshare = unshare_command()
    # A session of its own: Ctrl-C reaches only this process, which ends what is inside in order.
    with subprocess.Popen(
        [*unshare, *command], env=_environ(), stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        try:
            status = process.wait()
        finally:
            process.stdin.close()
            process.wait()
    return status if status >= 0 else 128 - status


def unshare_command() -> list[str]:
    """The words to put in front of a command to run it in private namespaces.

    Raises:
        ValueError: they cannot be made here; says what is missing and how to get it.
    """
    environ = _environ()
    for name, package in _PACKAGES.items():
        if shutil.which(name, path=environ["PATH"]) is None:
            raise ValueError(
                f"`{name}` not found: install {package} (apt install {package}, or dnf, or apk)"
            )
    unshare = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    trial = subprocess.run([*unshare, "true"], env=environ, capture_output=True, text=True)
    if trial.returncode != 0:
        said = "; ".join(trial.stderr.strip().splitlines())
        raise ValueError(f"private namespaces cannot be made ({said}): {_ADVICE}")
    return unshare


def end_with_standard_input() -> None:
    """In the sandboxed command: end this process, and so the namespaces, when the lifeline ends."""

    def wait_and_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_and_end, name="lifeline", daemon=True).start()


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}"}
