#!/usr/bin/env python3
"""Run Megatron-LM's own MoE tests on CPU ranks, with stock's `alltoall` and with ours in its place.

    scripts/megatron_suite.py --checkout DIR
    scripts/megatron_suite.py --checkout DIR --files test_a2a_token_dispatcher.py --log FOLDER
    scripts/megatron_suite.py --checkout DIR --suite a2a_overlap

Every test that passes with stock has to pass with ours. The tests are a copy in which the text
"alltoall" is "monta"; Megatron itself is the checkout's, unchanged. A round is a few tests of one
file: Megatron is imported once and forked into the ranks, which run them together. A test that does
not end on all ranks counts as failed, and the next round goes on behind it. Some tests fail on CPU
ranks whatever the dispatcher, or need Transformer Engine; they are counted as what they are with
stock.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
OUR_CODE = REPOSITORY / "src"
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

UNIT_TESTS = Path("tests", "unit_tests")
STOCK, OURS = "alltoall", "monta"
# Until the tests of a round are collected: 8 ranks may share 2 cores.
START_LIMIT_S = 240.0


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
    # The ranks are a session of their own, which does not end with this process by itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = UNIT_TESTS / arguments.suite
    suite = arguments.checkout / folder
    files = arguments.files or sorted(path.name for path in suite.glob("test_*.py"))
    missing = [name for name in files if not (suite / name).is_file()]
    if missing or not files:
        what = f"has no {missing[0]} in {folder}" if missing else f"has no tests in {folder}"
        parser.error(f"--checkout: {arguments.checkout} {what}, must be a checkout of Megatron-LM")

    with contextlib.ExitStack() as stack:
        log = arguments.log
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monta-suite-")))
        runs = {
            dispatcher: Run(arguments, dispatcher, log.absolute() / dispatcher)
            for dispatcher in (STOCK, OURS)
        }
        print(f"{'file':45} {'tests':>5} {'pass':>5} {OURS:>5} {'s':>5}")
        stock: dict[str, str] = {}
        ours: dict[str, str] = {}
        for name in files:
            began = time.monotonic()
            theirs = runs[STOCK].file(name)
            # Without the text, the tests are the same: they run once.
            mine = runs[OURS].file(name) if runs[OURS].is_swapped(name) else theirs
            passed = [test for test, outcome in theirs.items() if outcome == "passed"]
            kept = sum(mine.get(test) == "passed" for test in passed)
            print(
                f"{name:45} {len(theirs):5} {len(passed):5} {kept:5} "
                f"{time.monotonic() - began:5.0f}",
                flush=True,
            )
            stock |= theirs
            ours |= mine
    return verdict(stock, ours)


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
        self._checkout, self._ranks = arguments.checkout.absolute(), arguments.ranks
        self._tests_per_round, self._limit_s = arguments.tests_per_round, arguments.limit_s
        self._folder, self._suite = folder, UNIT_TESTS / arguments.suite
        shutil.rmtree(folder, ignore_errors=True)
        self._num_rounds = 0
        shutil.copytree(
            self._checkout / UNIT_TESTS,
            folder / UNIT_TESTS,
            ignore=shutil.ignore_patterns("__pycache__", "data"),
        )
        for source in (folder / self._suite).glob("*.py"):
            text = source.read_text()
            for quote in "\"'":
                text = text.replace(f"{quote}{STOCK}{quote}", f"{quote}{dispatcher}{quote}")
            source.write_text(text)

    def is_swapped(self, name: str) -> bool:
        """Whether the tests of a file, or what they may import beside them, name the dispatcher."""
        folder = self._folder / self._suite
        helpers = (path for path in folder.glob("*.py") if not path.name.startswith("test_"))
        texts = "".join(path.read_text() for path in (folder / name, *helpers))
        return any(f"{quote}{OURS}{quote}" in texts for quote in "\"'")

    def file(self, name: str) -> dict[str, str]:
        """Run one file in as many rounds as it takes: test -> its outcome, by stock's names."""
        outcomes: dict[str, str] = {}
        first: int | None = 0
        while first is not None:
            found, first = self._round(name, first)
            outcomes |= found
        return {test.replace(OURS, STOCK): outcome for test, outcome in outcomes.items()}

    def _round(self, name: str, first: int) -> tuple[dict[str, str], int | None]:
        """Run the tests of a file from one on: what each came to, and where the next round begins.

        That is behind a test that has not ended, so nothing is repeated; None at the file's end.
        """
        from free_ports import free_ports

        self._num_rounds += 1
        folder = self._folder / f"round{self._num_rounds}"
        folder.mkdir()
        environment = {
            **os.environ,
            "MONTA_CPU_RANKS": "1",
            "MONTA_ALLOW_ANY_MEGATRON": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (self._folder, self._checkout, OUR_CODE))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "SUITE_FOLDER": str(folder),
            "SUITE_FILE": str(self._suite / name),
            "SUITE_FIRST": str(first),
            "SUITE_NUM_TESTS": str(self._tests_per_round),
        }
        with open(folder / "start.log", "w") as log:
            # A session of its own: whatever it has forked ends with it.
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); "
                    "from scripts.megatron_suite import fork_ranks; fork_ranks()",
                ],
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self._wait(process, folder)
        by_rank = [read_events(folder / f"rank{rank}.jsonl") for rank in range(self._ranks)]
        tests = by_rank[0].pop("", [{"tests": []}])[0]["tests"]
        if not tests:
            print(f"no test was collected: {name}, see {folder}", file=sys.stderr)
        end = min(first + self._tests_per_round, len(tests))
        outcomes: dict[str, str] = {}
        for position in range(first, end):
            test = tests[position]
            results = [outcome_of(events.get(test, [])) for events in by_rank]
            outcomes[test] = merged(results)
            if None in results:
                end = position + 1
                break
        return outcomes, end if end < len(tests) else None

    def _wait(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Wait until all ranks are done, or no test has ended for too long; then end them."""
        seen, deadline = 0, time.monotonic() + START_LIMIT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if len(list(folder.glob("*.done"))) == self._ranks:
                    break
                size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
                if size != seen:
                    seen, deadline = size, time.monotonic() + self._limit_s
                time.sleep(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What a rank has noted, by test; under "" the tests that it was to run."""
    events: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        # The last line of a rank that was ended may be cut off.
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            events.setdefault(event["test"], []).append(event)
    return events


def outcome_of(events: list[dict[str, Any]]) -> str | None:
    """What a test came to on a rank; None where it has not ended."""
    for event in events:
        if event["outcome"] != "passed":
            return event["error"] or event["outcome"]
    return "passed" if any(event["when"] == "teardown" for event in events) else None


def merged(results: list[str | None]) -> str:
    """What a test came to: as on all ranks, or what is wrong on the first where anything is."""
    for kind in ("passed", "skipped"):
        if set(results) == {kind}:
            return kind
    for rank, result in enumerate(results):
        if result not in ("passed", "skipped", None):
            return f"rank {rank}: {result}"
    ranks = [str(rank) for rank, result in enumerate(results) if result is None]
    return f"does not end on ranks {', '.join(ranks)}" if ranks else "passed on some ranks only"


def fork_ranks() -> None:
    """Import Megatron once, fork every rank, and stay until the last of them has ended."""
    import torch
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401

    torch.set_num_threads(1)
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            with open(Path(os.environ["SUITE_FOLDER"], f"rank{rank}.log"), "w") as log:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(log.fileno(), stream.fileno())
            run_tests(rank)
            return
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def run_tests(rank: int) -> None:
    """Body of one rank: run the tests of this round with pytest, and note how each phase ends."""
    import pytest
    import torch

    class Notes:
        def __init__(self) -> None:
            self._file = open(Path(os.environ["SUITE_FOLDER"], f"rank{rank}.jsonl"), "w")  # noqa: SIM115

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            self._note(test="", tests=[item.nodeid for item in items])
            first, number = (int(os.environ[f"SUITE_{name}"]) for name in ("FIRST", "NUM_TESTS"))
            items[:] = items[first : first + number]

        def pytest_runtest_teardown(self, nextitem: Any) -> None:
            if nextitem is None:
                # Destroying groups takes a minute, with the threads of this many.
                torch.distributed.destroy_process_group = lambda *_: None

        def pytest_runtest_logreport(self, report: Any) -> None:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message.strip().partition("\n")[0] if crash is not None else ""
            self._note(test=report.nodeid, when=report.when, outcome=report.outcome, error=error)

        def _note(self, **event: Any) -> None:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()

    # It would bring data that no test of the suite reads.
    stub: Any = ModuleType("download_unit_tests_dataset")
    stub.download_and_extract_asset = lambda **_: None
    for package in ("tests.test_utils", "tests.test_utils.python_scripts"):
        sys.modules[package] = ModuleType(package)
    sys.modules[f"tests.test_utils.python_scripts.{stub.__name__}"] = stub
    # Its signals do not reach a rank that waits in a collective.
    options = ["-q", "--tb=short", "-p", "no:timeout", "-p", "no:cacheprovider", "--rootdir=."]
    pytest.main([*options, os.environ["SUITE_FILE"]], plugins=[Notes()])
    Path(os.environ["SUITE_FOLDER"], f"rank{rank}.done").touch()
    signal.pause()


if __name__ == "__main__":
    sys.exit(main())
