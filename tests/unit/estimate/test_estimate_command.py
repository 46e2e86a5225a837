"""`monta estimate`: its contract, its flags, and what it costs."""

import json
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from validate import changed_architecture

from monta_megatron.cli import main
from monta_megatron.common import presets
from monta_megatron.planner.assumptions import assumptions_of
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.estimate.estimate import EstimateRequest, estimate
from monta_megatron.tools.estimate.iteration import estimate_iteration
from monta_megatron.tools.estimate.layers import TrainingSettings

RUN = "qwen3_235b_a22b"


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["estimate", "--config", RUN, "--json", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def test_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document(capsys)
    dispatchers = list(shown["iteration_ms"])
    assert dispatchers[:2] == ["alltoall", "monta"] and "flex, deepep" in dispatchers
    assert list(shown["parts_ms"]) == dispatchers
    for name in dispatchers:
        parts = shown["parts_ms"][name]
        total = sum(time for part, time in parts.items() if part != "exchange, hidden")
        assert total == pytest.approx(shown["iteration_ms"][name])
    stock, chosen = (shown["iteration_ms"][name] for name in ("alltoall", "monta"))
    assert shown["saving_pct"] == pytest.approx(100 * (stock - chosen) / stock)
    # 256 GPUs.
    hours = (stock - chosen) / 1e3 * 1000 * 256 / 3600
    saved = shown["savings"]["monta"]["gpu_hours_per_1000_iterations"]
    assert saved == pytest.approx(hours)
    assert shown["memory_gb"]["total"] == pytest.approx(
        sum(size for part, size in shown["memory_gb"].items() if part != "total")
    )
    assert all(entry["source"] for entry in shown["assumptions"])


def test_flags_come_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document(
        capsys,
        *("--cluster", "h100_efa_p5", "--world-size", "128", "--pp", "4", "--ignore-memory"),
        *("--global-batch-size", "64", "--set", "host_layer_us=0", "--mfu", "0.5"),
        *("--", "--recompute-granularity", "full"),
    )
    settings, plain = shown["settings"], document(capsys)
    assert (settings["world_size"], settings["pp"], settings["tp"]) == (128, 4, 2)
    assert (settings["global_batch_size"], settings["recompute"]) == (64, "full")
    assert shown["cluster"] != plain["cluster"]
    values = {entry["name"]: entry for entry in shown["assumptions"]}
    assert values["host_layer_us"]["source"] == "--set host_layer_us"
    assert values["gemm_efficiency"]["value"] == values["attention_efficiency"]["value"] == 0.5
    assert shown["parts_ms"]["alltoall"]["waiting for the host"] == 0


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config", RUN]) == 0
    text = capsys.readouterr().out
    for words in ("predicted ms", "predicted saving", "exchange, hidden", "fitted: ", "GPU-h of"):
        assert words in text
    assert "measured" not in text
    for first in ("predicted ms", "predicted saving"):
        (heading,) = (line for line in text.splitlines() if line.startswith(first))
        columns = heading.replace("GPU-h of ", "GPU-h_of_").split()
        assert len(set(columns)) == len(columns)
    assert max(map(len, text.splitlines())) <= 80


def test_layouts_by_their_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is the estimate of its layout, and the exchange alone would rank them otherwise."""
    words = ["estimate", "--model", "mixtral_8x7b", "--cluster", "h100_8x_ndr"]
    words += ["--nodes", "2", "--pp", "2"]
    assert main([*words, "--json"]) == 0
    ranking = json.loads(capsys.readouterr().out)
    times = [row["iteration_ms"] for row in ranking]
    assert times == sorted(times) and len(times) > 10
    for row in ranking:
        parts = row["parts_ms"]
        assert parts["attention (GQA)"] > 0
        assert sum(parts.values()) - parts["exchange, hidden"] == pytest.approx(row["iteration_ms"])
    ranks = [row["exchange_rank"] for row in ranking]
    assert ranks != sorted(ranks) and min(ranks) == 1
    sizes = [text for name in ("tp", "ep", "etp") for text in (f"--{name}", ranking[0][name])]
    # Four micro-batches of a sequence fill each stage of a pipeline over 16 ranks.
    named = [*words, *map(str, sizes), "--global-batch-size", "64"]
    assert main([*named, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration_ms"]["monta"] == pytest.approx(times[0])
    assert main(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n") > min(len(ranking), 20)
    assert "total ms exchange ms attention ms bubble ms recompute ms GB place\n" in text


def test_where_nothing_is_gained_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of 8 experts for each token, inside one node."""
    words = ["--world-size", "8", "--ep", "8", "--pp", "1", "--ignore-memory"]
    assert main(["estimate", "--config", "mixtral_8x7b", "--cluster", "h100_8x_ndr", *words]) == 0
    assert "Predicted: not worth it here" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["monta_2x70b", "gpt_oss_120b", "deepseek_v3", "dbrx"])
def test_presets(capsys: pytest.CaptureFixture[str], run: str) -> None:
    """Expert tensor parallelism, windows, latent attention, MHA."""
    assert main(["estimate", "--config", run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert all(time > 0 for time in shown["iteration_ms"].values())
    parts = [time for of in shown["parts_ms"].values() for time in of.values()]
    assert min(parts) >= 0


def test_one_estimate_takes_less_than_a_second() -> None:
    """Of processor time, as others share the machine."""
    request = EstimateRequest(config=RUN, sizes={}, changes={})
    estimate(request)
    start = time.process_time()
    estimate(replace(request, sizes={"global_batch_size": 1024}))
    assert time.process_time() - start < 1


def test_a_thousand_points() -> None:
    """Under 10 s of processor time and 1 GB: layouts, batches, dispatchers and scales."""
    model, cluster = changed_architecture(RUN, {}), load_cluster("h100_8x_ndr")
    constants = assumptions_of("H100", cluster.name)
    start, number = time.process_time(), 0
    for world_size in (256, 512, 1024, 2048, 4096):
        for ep in (8, 16, 32, 64, 128):
            for pp in (1, 2, 4, 8):
                for dispatcher in ("alltoall", "deepep"):
                    for batch in (4, 8, 16, 32, 64, 128):
                        if world_size < ep * pp:
                            continue
                        settings = TrainingSettings(
                            world_size=world_size,
                            ep=ep,
                            pp=pp,
                            dispatcher=dispatcher,
                            global_batch_size=batch * world_size,
                        )
                        iteration = estimate_iteration(model, settings, cluster, constants)
                        assert iteration.total_ms > 0
                        number += 1
    assert number >= 1000
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1e6


def test_a_model_file_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    shutil.copy(presets.find("models", "qwen3_30b_a3b"), tmp_path / "models" / "own.yaml")
    words = "--model models/own.yaml --cluster h100_8x_ndr --world-size 64 --ep 8"
    assert main(["estimate", *words.split()]) == 0
    capsys.readouterr()
