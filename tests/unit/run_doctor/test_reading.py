"""What `monta doctor --run` reads: files of a folder, and one line for each that is malformed."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from watched_iteration import CHANGE, WATCHED

from monta_megatron.cli import main
from monta_megatron.tools.run_doctor.reading import read_run_folder
from monta_megatron.tools.run_doctor.report import diagnose

CONFIGS = Path(__file__).parents[3] / "configs"
LOG = """\
monta: chain alltoall, 1 chunk, EP 4 x ETP 1 over 2 nodes: as asked for
 iteration        1/      10 | elapsed time per iteration (ms): 900.0 | lm loss: 5.0E+00 |
 iteration        2/      10 | elapsed time per iteration (ms): 100.0 | lm loss: 4.0E+00 |
 iteration        3/      10 | elapsed time per iteration (ms): 120.0 | lm loss: 4.0E+00 |
(after 3 iterations) memory (MB) | allocated: 10.0 | max allocated: 1000.0 | reserved: 1.0
"""


def line(number: int, **changes: Any) -> str:
    """As the publisher writes it."""
    change = changes.pop("change", None)
    noticed = None if change is None else {**asdict(change), "text": change.text}
    watched = asdict(replace(WATCHED, iteration=number, **changes))
    return json.dumps({**watched, "change": noticed}) + "\n"


def lines(*numbers: int, **changes: Any) -> str:
    return "".join(line(number, **changes) for number in numbers)


def write(folder: Path, **files: str) -> Path:
    """Files by their names: `logs__run_log` is logs/run.log."""
    for name, content in files.items():
        path = folder / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


def test_medians_of_the_newest_lines_of_one_chain(tmp_path: Path) -> None:
    content = lines(10, 20, chain="alltoall", num_chunks=1)
    content += line(30, exchange_ms={"dispatch": 30.0, "combine": 10.0}, slowest_ranks=(1, 2))
    content += line(40, exchange_ms={"dispatch": 50.0, "combine": 10.0}, max_overload_factor=3.0)
    content += line(50, exchange_ms={"dispatch": 10.0, "combine": 10.0}, imbalance=0.1)
    run = read_run_folder(write(tmp_path, logs__exchange_rank_0_jsonl=content, run_log=LOG))
    of = run.exchange
    assert of is not None and (of.kind, of.chain, of.num_chunks) == (
        "measured",
        "hierarchical_alltoall",
        2,
    )
    assert of.basis == "logs/exchange_rank_0.jsonl, 3 watched iterations, 30 to 50"
    assert (of.exchange_ms, of.imbalance, of.max_overload_factor) == (40.0, 0.5, 3.0)
    assert of.link_over_predicted == {"inter": 2.0, "intra": 1.0}
    assert of.slowest_ranks == {2: 1.0, 1: pytest.approx(1 / 3)}
    # Without the first, which starts everything.
    assert run.iteration_ms == 110.0
    assert run.memory.allocated_bytes == 1000 * 2**20


def test_a_change_counts_until_the_link_is_as_fast_again(tmp_path: Path) -> None:
    before, after = lines(10, 20), lines(40, 50, link_over_predicted={"inter": 1.0})
    path = {"exchange_rank_0_jsonl": before + line(30, change=CHANGE) + after}
    run = read_run_folder(write(tmp_path, **path))
    (noticed,) = run.changes
    assert noticed.change == CHANGE and noticed.basis == "exchange_rank_0.jsonl, iteration 30"
    assert run.exchange is not None and run.exchange.basis.endswith(
        "3 watched iterations, 30 to 50"
    )
    back = replace(CHANGE, factor=0.25, rate_ratio=1.0)
    path["exchange_rank_0_jsonl"] += line(60, change=back)
    assert read_run_folder(write(tmp_path, **path)).changes == ()


def test_a_training_that_starts_again_goes_on_from_there(tmp_path: Path) -> None:
    """From a checkpoint of iteration 25, or anew: what was noticed after it has not been."""
    path = {"exchange_rank_0_jsonl": lines(10, 20) + line(30, change=CHANGE) + lines(40)}
    assert len(read_run_folder(write(tmp_path, **path)).changes) == 1
    path["exchange_rank_0_jsonl"] += lines(26)
    again = LOG.splitlines()[2].replace("100.0", "300.0")
    write(tmp_path, run_log=f"{LOG}{again}\n")
    run = read_run_folder(write(tmp_path, **path))
    assert run.changes == () and run.exchange is not None
    assert run.exchange.basis.endswith("3 watched iterations, 10 to 26")
    # Of iteration 2, which ran again; the third has not.
    assert run.iteration_ms == 300.0
    path["exchange_rank_0_jsonl"] += lines(1, 2)
    run = read_run_folder(write(tmp_path, **path))
    assert run.exchange is not None
    assert run.exchange.basis.endswith("2 watched iterations, 1 to 2")


def test_a_line_cut_short_and_changes_long_ago(tmp_path: Path) -> None:
    """Of a long file the newest lines are read, and all in which a change was noticed."""
    content = line(1, change=CHANGE) + lines(*range(2, 100)) + line(100)[:40]
    run = read_run_folder(write(tmp_path, exchange_rank_0_jsonl=content))
    assert run.exchange is not None
    assert run.exchange.basis.endswith("20 watched iterations, 80 to 99")
    assert [noticed.basis for noticed in run.changes] == ["exchange_rank_0.jsonl, iteration 1"]


def test_the_first_files_held_no_times_of_links(tmp_path: Path) -> None:
    watched = json.loads(line(1))
    for name in ("link_ms", "predicted_busy_ms", "calibrated_links"):
        del watched[name]
    run = read_run_folder(write(tmp_path, exchange_rank_0_jsonl=json.dumps(watched) + "\n"))
    names = ["ranks that wait", "imbalance of the experts"]
    assert [finding.name for finding in diagnose(run)] == names


def test_the_slowest_exchange_counts_and_changes_of_all(tmp_path: Path) -> None:
    write(tmp_path, exchange_rank_0_jsonl=line(30, change=CHANGE))
    write(tmp_path, exchange_rank_4_jsonl=line(30, exchange_ms={"dispatch": 99.0}))
    run = read_run_folder(tmp_path)
    assert run.exchange is not None and run.exchange.exchange_ms == 99.0
    assert [noticed.basis for noticed in run.changes] == ["exchange_rank_0.jsonl, iteration 30"]
    assert "the slowest of 2 exchanges" in run.notes


def test_a_log_that_ends_out_of_memory(tmp_path: Path) -> None:
    said = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    run = read_run_folder(write(tmp_path, logs__42_log=f"{LOG}{said}\n[rank2]: out of memory\n"))
    assert run.memory.out_of_memory == said and run.memory.basis == "logs/42.log"
    assert run.exchange is None


def test_what_ended_an_earlier_job_is_over(tmp_path: Path) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory."
    write(tmp_path, logs__99_log=f"{LOG}{said}\n", logs__100_log=LOG)
    run = read_run_folder(tmp_path)
    assert run.memory.out_of_memory is None and run.memory.basis == "logs/100.log"
    # So is what iterations came after.
    write(tmp_path, logs__100_log=f"{said}\n{LOG}")
    assert read_run_folder(tmp_path).memory.out_of_memory is None


def test_a_plan_alone_is_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = CONFIGS / "models/mixtral_8x7b.yaml", CONFIGS / "clusters/a800_2x8_ib200.yaml"
    out = str(tmp_path / "plan.yaml")
    words = ["--model", str(model), "--cluster", str(cluster), "--ep", "8", "--out", out]
    assert main(["plan", *words]) == 0
    capsys.readouterr()
    assert main(["doctor", "--run", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    of = document["exchange"]
    assert (of["kind"], of["of_iteration"], of["link_ms"]) == ("predicted", False, {})
    assert of["exchange_ms"] == of["predicted_ms"] > max(of["busy_ms"].values())
    assert any("--moe-monta-watch-steps N" in note for note in document["notes"])
    assert {finding["kind"] for finding in document["findings"]} <= {"predicted"}


def test_a_run_that_has_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predicted for its iteration: 2 layers and one micro-batch; a chain by hand is priced too."""
    folder, config = tmp_path / "run", CONFIGS / "runs/quickstart.yaml"
    write_run = ["--config", str(config), "--start", "none", "--run-directory", str(folder)]
    assert main(["launch", *write_run, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert main(["doctor", "--run", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    of, what_if = document["exchange"], document["what_if"]
    assert of["of_iteration"] and what_if["is_named"] and not what_if["experts_asked"]
    assert what_if["ran"]["us"] == pytest.approx(plan["predicted_us"], rel=0.02)
    assert of["exchange_ms"] == pytest.approx(2 * what_if["ran"]["us"] / 1e3)
    assert what_if["eight_bits"]["us"] < what_if["ran"]["us"]
    assert what_if["fastest"]["us"] < what_if["ran"]["us"]
    assert document["findings"][0]["name"] == "network"
    assert "--moe-monta-chain auto" in document["findings"][0]["advice"][0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (line(1) + "{\n", ["must hold one JSON document per line; line 2 is none"]),
        ("[" * 100_000 + "\n", ["must hold one JSON document per line; line 1 is none"]),
        (line(1, chain="alltoal"), ["line 1: chain: got 'alltoal', must be one of alltoall"]),
        ("[]\n", ["line 1: got [], must be a mapping with the keys iteration"]),
        (line(1) + '{"iteration": 2}\n', ["line 2: chain, num_chunks", "missing, must be given"]),
        (line(1, predicted_ms=-3.0), ["line 1: predicted_ms: got -3.0, must be a number > 0"]),
        (line(1, imbalance=float("nan")), ["line 1: imbalance: got nan"]),
        (line(1, exchange_ms={"dispatch": "fast"}), ["exchange_ms.dispatch: got 'fast'"]),
        (line(1).replace('"chain"', '"chian"'), ["line 1: chian: unknown key; did you mean chain"]),
        (line(1, change=replace(CHANGE, rate_ratio=0.0)), ["change.rate_ratio: got 0.0"]),
    ],
)
def test_a_malformed_line_is_one_line(
    content: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, exchange_rank_0_jsonl=content)
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    said = capsys.readouterr()
    (error,) = said.err.splitlines()
    assert said.out == "" and error.startswith(f"monta doctor: {tmp_path}")
    assert [word for word in words if word not in error] == []


def test_a_folder_with_nothing_says_what_to_switch_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, plan_txt="", logs__exchange_rank_0_json="")
    for folder, words in (
        (tmp_path, ["exchange_rank_*.jsonl", "--moe-monta-watch-steps", "--moe-monta-watch-out"]),
        (tmp_path / "nowhere", ["must be a folder"]),
    ):
        assert main(["doctor", "--run", str(folder)]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"monta doctor: --run: got {folder}, must")
        assert [word for word in words if word not in error] == []


def test_figures_that_are_not_there_are_nobodys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: dict[str, Any] = {name: {} for name in ("exchange_ms", "link_ms", "predicted_busy_ms")}
    write(tmp_path, exchange_rank_0_jsonl=line(1, **nothing))
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    assert " 0 us of an iteration, measured" in capsys.readouterr().out


def test_other_malformed_files_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").mkdir()
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == f"monta doctor: {tmp_path}/a.log: cannot be read: Is a directory"
    (tmp_path / "a.log").rmdir()
    write(tmp_path, plan_yaml="chain: alltoll\n")
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/plan.yaml" in error
    write(tmp_path, plan_yaml="", logs__run_log=LOG, run_sh="", config_yaml="name: x\nlayot: 1\n")
    (tmp_path / "plan.yaml").unlink()
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/config.yaml: layot" in error
