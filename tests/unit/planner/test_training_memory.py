"""What a training holds on a rank, and that a layout which does not fit is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import CONFIGS, LAUNCH, preset

from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.planner.layout import ParallelLayout, workloads_of
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.models.training_memory import (
    HeldState,
    TrainingMemory,
    check_bytes,
    plan_within_memory,
    state_bytes,
    training_memory,
)
from monta_megatron.planner.plan import Plan

QWEN = strict_yaml.load(Model, CONFIGS / "models" / "qwen3_235b_a22b.yaml")
# Of a host that costs little, so that chunks are worth their time.
H100 = replace(
    preset("h100_8x_ndr"),
    launch=replace(LAUNCH, collective_us=11.4, copy_us=7.6, sum_us=7.6, find_us=68.4),
    fused_kernels=False,
)
# 94 layers of 4096; 4096 tokens per micro-batch, of which a rank brings half at TP 2.
FITS = ParallelLayout(world_size=128, tp=2, ep=16, pp=4)
# The state of 235 billion parameters on 16 ranks.
TOO_FEW = ("--world-size", "16", "--ep", "16")
FILES = (
    *("--model", str(CONFIGS / "models" / "qwen3_235b_a22b.yaml")),
    *("--cluster", str(CONFIGS / "clusters" / "h100_8x_ndr.yaml")),
)


def memory_of(layout: ParallelLayout, model: Model = QWEN, **settings: Any) -> TrainingMemory:
    workloads = workloads_of(model, layout, 8)
    return training_memory(model, H100, layout, workloads, **settings)


def plan_in(memory_gb: float | None, **settings: Any) -> tuple[Plan, TrainingMemory]:
    cluster = replace(H100, memory_gb_per_rank=memory_gb)
    workloads = workloads_of(QWEN, FITS, 8)
    memory = training_memory(QWEN, cluster, FITS, workloads, **settings)
    plan, _, memory = plan_within_memory(workloads, cluster, memory, where="layout")
    return plan, memory


def test_what_is_held_by_hand() -> None:
    memory = memory_of(FITS)
    # Every stage has 94 / 4 layers; the first one holds their inputs for 4 micro-batches, in bf16.
    assert memory.activation_bytes == 94 / 4 * 4 * 2048 * 4096 * 2
    assert memory.state_bytes == state_bytes(QWEN, FITS)
    # Weights, gradients and two moments of 4 bytes each, or all 16 of them sharded.
    alone = ParallelLayout(world_size=1)
    full = memory_of(alone, replace(QWEN, dtype="fp32"))
    assert full.state_bytes == pytest.approx(235e9 * 16, rel=0.01)
    sharded = HeldState(bytes_per_parameter=0, sharded_bytes_per_parameter=16)
    assert state_bytes(QWEN, ParallelLayout(world_size=8), sharded) == pytest.approx(
        full.state_bytes / 8
    )
    # Two micro-batches do not fill four stages.
    few = HeldState(bytes_per_parameter=6, sharded_bytes_per_parameter=12, num_micro_batches=2)
    assert memory_of(FITS, held=few).activation_bytes == memory.activation_bytes / 2
    none = replace(few, layers_per_input=None)
    assert memory_of(FITS, held=none).activation_bytes == 0


def test_first_use_checks_are_counted() -> None:
    """256 tokens with 8 experts each are 2048 rows of 4096 values, as many on every rank."""
    _, memory = plan_in(80)
    rows = 256 * 8
    # The tokens, and from either dispatcher as many back, and rows at the experts; these make more.
    held = (256 + 2 * (256 + rows) + rows) * 4096 * 2
    assert memory.check_bytes == held < memory.exchange_bytes
    assert "exchange 509 MB (first-use checks, before it, 56.6 MB)" in memory.parts
    # They are over when the exchange begins, and so what is needed is the larger one.
    less = replace(memory, check_bytes=0.0)
    assert memory.needed_bytes == less.needed_bytes
    more = replace(memory, check_bytes=memory.exchange_bytes + 1)
    assert more.needed_bytes == less.needed_bytes + 1
    # With ETP 2 a rank has the rows of two; alone it has nobody to check against.
    layout = replace(FITS, ep=8, etp=2)
    twice = (256 + 2 * (256 + 2 * rows) + 2 * rows) * 4096 * 2
    assert [check_bytes(each) for each in workloads_of(QWEN, layout, 8)] == [twice]
    assert {check_bytes(each) for each in workloads_of(QWEN, replace(FITS, ep=1), 8)} == {0.0}


def test_a_chain_that_leaves_too_little_gives_way() -> None:
    free, needed = plan_in(80)
    beside = needed.state_bytes + needed.activation_bytes
    # Between the buffers of the fastest chain in 2 chunks (509 MB) and in 4 (366 MB), and those of
    # its communicators: 7 peers x 16 channels x 12 MiB in the node, 4 channels x 4 MiB on the rail.
    communicators = (7 * 16 * 12 + 4 * 4) * 2**20
    assert needed.communicator_bytes == communicators
    plan, memory = plan_in((beside + communicators + 400e6) / 1e9)
    assert (free.chain, free.num_chunks) == ("hierarchical_alltoall", 2)
    assert (plan.chain, plan.num_chunks) == ("hierarchical_alltoall", 4)
    assert memory.fits and memory.exchange_bytes < 400e6 < needed.exchange_bytes
    # No room for communicators: a chain that has none of its own, in the same memory.
    plan, memory = plan_in((beside + 400e6) / 1e9)
    assert plan.chain == "alltoall_dedup" and memory.communicator_bytes == 0 and memory.fits
    (first, *_) = (each for each in plan.candidates if each.chain == free.chain)
    assert first.rejected is not None and "over the limit of 0.4 GB" in first.rejected
    with pytest.raises(ValueError, match=r"^layout: needs 51 GB on a rank, at the least"):
        plan_in((beside + 100e6) / 1e9)
    ignoring, memory = plan_in((beside + 100e6) / 1e9, ignore_memory=True)
    assert ignoring.chain == free.chain and memory.ignored


def test_a_limit_of_the_users_is_for_the_exchange_alone() -> None:
    workloads = workloads_of(QWEN, FITS, 8)

    def chosen(memory_gb: float) -> tuple[str, int | None]:
        cluster = replace(H100, memory_gb_per_rank=memory_gb)
        memory = training_memory(QWEN, cluster, FITS, workloads)
        plan, _, memory = plan_within_memory(
            workloads, cluster, memory, where="layout", memory_limit_bytes=400e6
        )
        assert memory.fits
        return plan.chain, plan.num_chunks

    _, needed = plan_in(80)
    beside = (needed.state_bytes + needed.activation_bytes) / 1e9
    assert chosen(80) == ("hierarchical_alltoall", 4)
    # Room for 366 MB and communicators of 1,426 MB; for less than both; not even for the latter.
    assert chosen(beside + 1.9) == ("hierarchical_alltoall", 4)
    assert chosen(beside + 1.69) == ("hierarchical_alltoall", 8)
    assert chosen(beside + 0.5) == ("alltoall_dedup", 4)


def test_unknown_memory_is_no_limit_and_said() -> None:
    plan, memory = plan_in(None)
    assert plan == plan_in(80)[0] and memory.available_bytes is None
    assert "no check, as the cluster file has no memory_gb_per_rank" in memory.describe()


COMMANDS = {
    "plan": (),
    "simulate": ("--sweep", "tokens=4096,512"),
    "timeline": ("--phase", "forward"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_layout_that_does_not_fit_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [command, *FILES, *COMMANDS[command]]
    assert main([*words, *TOO_FEW]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    where = "--sweep: tokens 4,096" if command == "simulate" else "layout"
    assert said.out == "" and line.startswith(f"monta {command}: {where}: needs 3")
    for part in ("optimizer 309 GB", "layer inputs", "exchange", "at most 80 GB", "H100"):
        assert part in line
    assert list(tmp_path.iterdir()) == []

    assert main([*words, *TOO_FEW, "--ignore-memory"]) == 0
    assert "of a rank's 80 GB, ignored as asked" in " ".join(capsys.readouterr().out.split())
    assert main([*words, *TOO_FEW, "--ignore-memory", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    if command == "simulate":
        document = document["points"][0]
    memory = document.get("memory") or document["about"]["memory"]
    assert memory["ignored"] and memory["needed_bytes"] > 309e9 > memory["available_bytes"]
    parts = ("state_bytes", "activation_bytes", "exchange_bytes", "communicator_bytes")
    assert memory["needed_bytes"] == sum(memory[part] for part in parts)


def test_a_small_memory_of_the_cluster_file_is_a_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = yaml.safe_load((CONFIGS / "clusters" / "h100_8x_ndr.yaml").read_text())
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**data, "memory_gb_per_rank": 8}))
    words = ["plan", *FILES[:2], "--cluster", str(path), "--world-size", "128", "--pp", "4"]
    assert main([*words, "--tp", "2", "--ep", "16"]) == 2
    assert "must be at most 8 GB, memory_gb_per_rank of H100" in capsys.readouterr().err
    # Nor is there another layout; what is ignored for one is ignored for all.
    assert main(words) == 2
    assert "no (tp, ep, etp) fits" in capsys.readouterr().err
    assert main([*words, "--ignore-memory"]) == 0
    assert "ignored as asked" in " ".join(capsys.readouterr().out.split())
