#!/usr/bin/env python3
"""Run Megatron-LM's own MoE tests on CPU ranks, with stock's `alltoall` and with ours in its place.

    scripts/megatron_suite.py --checkout DIR
    scripts/megatron_suite.py --checkout DIR --files test_a2a_token_dispatcher.py --log FOLDER
    scripts/megatron_suite.py --checkout DIR --suite a2a_overlap

Every test that passes with stock has to pass with ours. The tests are a copy in which the text
"alltoall" is "monta"; Megatron itself is the checkout's, unchanged. It is imported once, and a
round forks the ranks, which run a few tests of one file together. A test that does not end on all
ranks counts as failed, and the next round goes on behind it. Some tests fail on CPU ranks whatever
the dispatcher, or need Transformer Engine; they are counted as what they are with stock.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
UNIT_TESTS = Path("tests", "unit_tests")
STOCK, OURS = "alltoall", "monta"
ENVIRONMENT = {
    "MONTA_CPU_RANKS": "1",
    "MONTA_ALLOW_ANY_MEGATRON": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
}
# Until the tests of a round are collected: 8 ranks may share 2 cores.
START_LIMIT_S = 240.0
# pytest-timeout's signals do not reach a rank that waits in a collective.
PYTEST_OPTIONS = ("-q", "--tb=short", "-p", "no:timeout", "-p", "no:cacheprovider", "--rootdir=.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True, help="of Megatron-LM; not changed")
    parser.add_argument("--ranks", type=int, default=8, help="what the tests are written for")
    parser.add_argument(
        "--suite", type=Path, default="transformer/moe", help="folder of tests/unit_tests"
    )
    parser.add_argument("--files", nargs="+", metavar="FILE", help="of the suite; all unless given")
    parser.add_argument(
        "--tests-per-round", type=int, default=16, help="every Gloo group of a round keeps threads"
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="seconds in which the next test has to end"
    )
    parser.add_argument("--log", type=Path, help="folder for what the ranks print")
    arguments = parser.parse_args()
    # The ranks are sessions of their own, which do not end with this process by themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = UNIT_TESTS / arguments.suite
    suite = arguments.checkout / folder
    files = arguments.files or sorted(path.name for path in suite.glob("test_*.py"))
    missing = [name for name in files if not (suite / name).is_file()]
    if missing or not files:
        what = f"has no {missing[0]} in {folder}" if missing else f"has no tests in {folder}"
        parser.error(f"--checkout: {arguments.checkout} {what}, must be a checkout of Megatron-LM")

    import_megatron(arguments.checkout, arguments.ranks)
    with contextlib.ExitStack() as stack:
        log = arguments.log
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monta-suite-")))
        runs = [Run(arguments, name, log.absolute() / name) for name in (STOCK, OURS)]
        print(f"{'file':45} {'tests':>5} {'pass':>5} {OURS:>5} {'s':>5}", flush=True)
        stock: dict[str, str] = {}
        ours: dict[str, str] = {}
        for name in files:
            began = time.monotonic()
            theirs = runs[0].file(name)
            # Without the text, the tests are the same: they run once.
            mine = runs[1].file(name) if runs[1].is_swapped(name) else theirs
            passed = [test for test, outcome in theirs.items() if outcome == "passed"]
            kept = sum(mine.get(test) == "passed" for test in passed)
            seconds = time.monotonic() - began
            print(f"{name:45} {len(theirs):5} {len(passed):5} {kept:5} {seconds:5.0f}", flush=True)
            stock |= theirs
            ours |= mine
    return verdict(stock, ours)


def import_megatron(checkout: Path, num_ranks: int) -> None:
    """Import what all ranks need, as the environment of CPU ranks asks for it."""
    os.environ.update(ENVIRONMENT, WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    sys.dont_write_bytecode = True
    ours = (REPOSITORY / "src", REPOSITORY / "tests" / "support")
    sys.path[:0] = [str(checkout.absolute()), *map(str, ours)]
    import torch
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401

    torch.set_num_threads(1)


def verdict(stock: dict[str, str], ours: dict[str, str]) -> int:
    """Print what each test came to with stock and with ours; 1 unless ours pass where stock's do.

    Args:
        stock, ours: outcome of each test, "passed", "skipped", or what was wrong.
    """
    passed = [test for test, outcome in stock.items() if outcome == "passed"]
    worse = {test: ours.get(test, "did not run") for test in passed if ours.get(test) != "passed"}
    kinds = Counter(kind if kind in ("passed", "skipped") else "failed" for kind in stock.values())
    print(f"with stock: {', '.join(f'{number} {kind}' for kind, number in sorted(kinds.items()))}")
    print(f"with {OURS}: {len(passed) - len(worse)} of the {len(passed)} that pass with stock")
    for test, outcome in worse.items():
        print(f"  {test}: {outcome}")
    return 0 if passed and not worse else 1


class Run:
    """The suite with one dispatcher.

    Args:
        arguments: of the command line.
        dispatcher: the type that the tests name.
        folder: for the tests and for what the ranks print; made anew.
    """

    def __init__(self, arguments: argparse.Namespace, dispatcher: str, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._suite = UNIT_TESTS / arguments.suite
        self._num_rounds = 0
        self._swapped: set[str] = set()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(
            arguments.checkout / UNIT_TESTS,
            folder / UNIT_TESTS,
            ignore=shutil.ignore_patterns("__pycache__", "data"),
        )
        for source in (folder / self._suite).glob("*.py"):
            text = source.read_text()
            swapped = text.replace(f'"{STOCK}"', f'"{dispatcher}"')
            swapped = swapped.replace(f"'{STOCK}'", f"'{dispatcher}'")
            if swapped != text:
                source.write_text(swapped)
                self._swapped.add(source.name)

    def is_swapped(self, name: str) -> bool:
        """Whether the tests of a file, or what they may import beside them, name the dispatcher."""
        return any(each == name or not each.startswith("test_") for each in self._swapped)

    def file(self, name: str) -> dict[str, str]:
        """Run one file in as many rounds as it takes: test -> its outcome, by stock's names."""
        outcomes: dict[str, str] = {}
        tests, num_done = [""], 0
        while num_done < len(tests):
            by_rank = self._round(name, num_done)
            tests = by_rank[0].pop("", [])
            if not tests:
                print(f"no test was collected: {name}, see {self._folder}", file=sys.stderr)
            # Behind a test that has not ended, so nothing is repeated.
            for test in tests[num_done : num_done + self._arguments.tests_per_round]:
                results = [of_rank.get(test) for of_rank in by_rank]
                outcomes[test.replace(OURS, STOCK)] = merged(results)
                num_done += 1
                if None in results:
                    break
        return outcomes

    def _round(self, name: str, first: int) -> list[dict[str, Any]]:
        """Run some tests of a file, from one on; what each rank has noted of them."""
        from free_ports import free_ports

        self._num_rounds += 1
        folder = self._folder / f"round{self._num_rounds}"
        folder.mkdir()
        os.environ["MASTER_PORT"] = str(free_ports(1)[0])
        ranks: list[int] = []
        try:
            for rank in range(self._arguments.ranks):
                child = os.fork()
                if child == 0:
                    self._run_rank(rank, folder, name, first)
                ranks.append(child)
            self._wait(folder)
        finally:
            for child in ranks:
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError):
                        kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return [read_notes(folder / f"rank{rank}.jsonl") for rank in range(len(ranks))]

    def _run_rank(self, rank: int, folder: Path, name: str, first: int) -> None:
        """Body of a rank, which stays until it is ended."""
        try:
            # A session of its own: whatever it forks ends with it.
            os.setsid()
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            os.chdir(self._folder)
            sys.path.insert(0, str(self._folder))
            tests = slice(first, first + self._arguments.tests_per_round)
            run_tests(str(self._suite / name), Notes(folder / f"rank{rank}.jsonl", tests))
            (folder / f"rank{rank}.done").touch()
            signal.pause()
        except BaseException:  # noqa: BLE001 - as an interpreter ends
            traceback.print_exc()
        os._exit(1)

    def _wait(self, folder: Path) -> None:
        """Wait until all ranks are done, or no test has ended for too long."""
        seen, deadline = 0, time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if len(list(folder.glob("*.done"))) == self._arguments.ranks:
                return
            size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            if size != seen:
                seen, deadline = size, time.monotonic() + self._arguments.limit_s
            time.sleep(0.2)


class Notes:
    """A pytest plugin that selects tests and notes their outcomes, by test; under "" all tests.

    Args:
        path: of the file, JSON lines.
        tests: which of a file's tests run.
    """

    def __init__(self, path: Path, tests: slice) -> None:
        self._path, self._tests, self._outcome = path, tests, ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Note all, keep some."""
        self._note("", [item.nodeid for item in items])
        items[:] = items[self._tests]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of setup, call and teardown, the first that has not passed tells the outcome."""
        if report.when == "setup":
            self._outcome = "passed"
        if self._outcome == "passed" and report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            error = "" if crash is None else crash.message.strip().partition("\n")[0]
            self._outcome = error or report.outcome
        if report.when == "teardown":
            self._note(report.nodeid, self._outcome)

    def pytest_runtest_teardown(self, nextitem: Any) -> None:
        """Keep the groups of the last test: destroying them takes a minute, with their threads."""
        if nextitem is None:
            import torch

            torch.distributed.destroy_process_group = lambda *_: None

    def _note(self, test: str, note: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([test, note]) + "\n")


def read_notes(path: Path) -> dict[str, Any]:
    """What a rank has noted; the last line of one that was ended may be cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def merged(results: Sequence[str | None]) -> str:
    """What a test came to: as on all ranks, or what is wrong on the first where anything is."""
    for kind in ("passed", "skipped"):
        if set(results) == {kind}:
            return kind
    for rank, result in enumerate(results):
        if result not in ("passed", "skipped", None):
            return f"rank {rank}: {result}"
    ranks = [str(rank) for rank, result in enumerate(results) if result is None]
    return f"does not end on ranks {', '.join(ranks)}" if ranks else "passed on some ranks only"


def run_tests(file: str, notes: Notes) -> None:
    """Run the tests of a file with pytest."""
    import pytest

    # It would bring data that no test of the suite reads.
    stub: Any = ModuleType("download_unit_tests_dataset")
    stub.download_and_extract_asset = lambda **_: None
    for package in ("tests.test_utils", "tests.test_utils.python_scripts"):
        sys.modules[package] = ModuleType(package)
    sys.modules[f"tests.test_utils.python_scripts.{stub.__name__}"] = stub
    pytest.main([*PYTEST_OPTIONS, file], plugins=[notes])


if __name__ == "__main__":
    sys.exit(main())
