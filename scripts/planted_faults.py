#!/usr/bin/env python3
"""Plant the faults of tests/faults.yaml, one at a time, and report which of them the tests find.

    scripts/planted_faults.py [TEXT...]    all, or those with a text in their file or name
    scripts/planted_faults.py --check      only look for the code to change

The tests run without a fault first, because a test that fails anyway finds nothing.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import yaml

LIMIT_S = 300  # of one pytest run; ranks that wait for each other give up after a minute


def find_file(fault: dict[str, Any], package: Path) -> Path:
    """The file to change: the one that the fault names, or the only one that holds the code."""
    old, named = fault["old"], package / fault["file"]
    paths = [named] if named.is_file() and old in named.read_text() else package.rglob("*.py")
    found = [path for path in paths for _ in range(path.read_text().count(old))]
    if len(found) != 1:
        raise SystemExit(f"{fault['name']}: {old!r} occurs {len(found)} times, must occur once")
    return found[0]


def first_failure(tests: list[str], fault: dict[str, Any] | None = None) -> str | None:
    """The first test that fails, with a fault planted; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree("src", source, ignore=shutil.ignore_patterns("__pycache__"))
        # Presets are found from the package.
        Path(folder, "configs").symlink_to(Path("configs").resolve())
        if fault is not None:
            path = find_file(fault, source / "monta_megatron")
            path.write_text(path.read_text().replace(fault["old"], fault["new"]))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = os.environ | {"PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        pytest = Popen(command, env=env, stdout=PIPE, text=True, start_new_session=True)
        try:
            output, _ = pytest.communicate(timeout=None if fault is None else LIMIT_S)
        except TimeoutExpired:
            return f"the time limit of {LIMIT_S} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if pytest.returncode != 0 and not failed:
        raise SystemExit(f"pytest ended with status {pytest.returncode}:\n{output}")
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="in the file or name of a fault")
    parser.add_argument("--check", action="store_true", help="only look for the code to change")
    parser.add_argument("--no-clean", action="store_true", help="trust the tests without a fault")
    arguments = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[1])
    texts, listed = arguments.texts or [""], yaml.safe_load(Path("tests/faults.yaml").read_text())
    faults = [each for each in listed if any(text in each["file"] + each["name"] for text in texts)]
    files = [find_file(fault, Path("src/monta_megatron")) for fault in faults]
    print(f"{len(files)} faults can be planted", flush=True)
    if arguments.check or not faults:
        return
    tests = dict.fromkeys(test for fault in faults for test in fault["tests"])
    if not arguments.no_clean and (failed := first_failure(list(tests))):
        raise SystemExit(f"{failed} fails without a fault")
    num_found = 0
    for fault in faults:
        began_s = time.monotonic()
        test = first_failure(fault["tests"], fault)
        num_found += test is not None
        result = f"found {fault['name']} by {test}" if test else f"NOT FOUND {fault['name']}"
        print(f"{result} in {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{num_found} of {len(faults)} faults found")


if __name__ == "__main__":
    main()
