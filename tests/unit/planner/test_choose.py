"""Candidates and trials by number; prices are given by hand."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from clusters import by_hand, preset, shape_of

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.program import Phase
from monta_megatron.core import Choice
from monta_megatron.planner import plan as planner_plan
from monta_megatron.planner.choose import STOCK, Planner, half_octave
from monta_megatron.planner.plan import NUM_CHUNKS
from monta_megatron.planner.trials import Work
from monta_megatron.planner.tuning import TuningWindow

LETTERS = {"alltoall": "a", "hierarchical_alltoall": "h", "alltoall_dedup": "d"}
# us of a chain in 1, 2, 4 and 8 chunks.
PRICES = {"a": [100.0], "h": [60.0, 50.0, 55.0, 70.0], "d": [90.0, 80.0, 85.0, 95.0]}


def name_of(choice: Choice) -> str:
    """As the files of cases write it."""
    return f"{LETTERS[choice.chain]}{choice.num_chunks}{'+' if choice.splits_experts else ''}"


def planner_of(num_chunks: tuple[int, ...] = NUM_CHUNKS, splits_experts: bool = False) -> Planner:
    return Planner(
        chains=tuple(CHAINS[chain] for chain in LETTERS),
        num_chunks=num_chunks,
        splits_experts=splits_experts,
        shape=shape_of(16),
        cluster=preset("h100_8x_ndr"),
    )


@pytest.mark.parametrize("case", by_hand("candidates"))
def test_candidates_by_hand(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prices, peaks = {**PRICES, **case.get("prices", {})}, case.get("peaks", {})

    def price(_: object, __: object, chain: Chain, num_chunks: int, phase: Phase) -> Any:
        assert phase == "forward_backward"
        choice = Choice(chain=chain.name, num_chunks=num_chunks)
        total_us = prices[LETTERS[chain.name]][NUM_CHUNKS.index(num_chunks)]
        return SimpleNamespace(
            chain=chain,
            choice=choice,
            total_us=total_us,
            # Those that do the same have the same peak.
            peak_bytes=peaks.get(name_of(choice), 100 + 10 * len(chain.stages) + num_chunks),
            sort_key=(round(total_us, 1), chain.name != "alltoall", len(chain.stages), num_chunks),
            busiest=lambda: ("network", 10.0),
        )

    monkeypatch.setattr(planner_plan, "price", price)
    planner = planner_of(case.get("num_chunks", NUM_CHUNKS), case.get("splits_experts", False))
    found = planner.candidates(4096, case.get("max_candidates", 8))
    by_name = [(name_of(choice), round(us, 1)) for choice, us in found.items()]
    assert by_name == list(case["found"].items())
    choice, why = planner.pick(4000)
    assert name_of(choice) == case.get("pick", name_of(choice)) and why == case.get("why", why)


def test_a_half_octave_of_tokens_is_priced_once() -> None:
    sizes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 4096, 4097]
    octaves = [1, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 4096, 6144]
    assert [half_octave(tokens) for tokens in sizes] == octaves
    planner = planner_of()
    assert planner.selection(3100) is planner.selection(4096) is not planner.selection(4097)


@pytest.mark.parametrize(
    ("chain", "num_chunks", "asked", "splits"),
    [
        ("alltoall", 1, True, False),
        ("alltoall_allgather", 2, True, False),
        ("hierarchical_alltoall", 2, True, True),
        ("alltoall_dedup", 1, False, False),
        ("alltoall_dedup", 8, True, True),
    ],
)
def test_a_given_choice_is_not_priced(
    chain: str, num_chunks: int, asked: bool, splits: bool
) -> None:
    given = Planner(chains=(CHAINS[chain],), num_chunks=(num_chunks,), splits_experts=asked)
    assert given.fixed == Choice(chain=chain, num_chunks=num_chunks, splits_experts=splits)
    # Experts are split in up to 4 chunks.
    assert given.num_blocks == blocks_for(max(num_chunks, 4 if asked else 1))


A, B, C = STOCK, *(Choice(chain=name, num_chunks=2) for name in list(LETTERS)[1:])


def window_of(candidates: dict[Choice, float], **changes: Any) -> TuningWindow:
    return TuningWindow(
        **{"candidates": candidates, "tokens": 4000, "first": 0, "num_steps": 6, **changes}
    )


@pytest.mark.parametrize("num_steps", [6, 7, 24, 25])
def test_rounds_are_in_phase_with_a_trial_of_each_candidate(num_steps: int) -> None:
    length = num_steps // 3
    for first in (100, 103, 107):
        window = window_of({A: 3, B: 2, C: 1}, first=first, num_steps=num_steps)
        steps = range(window.first, window.end)
        assert all(window.candidate_of(step) == (A, B, C)[step % length % 3] for step in steps)
        assert min(Counter(step % length for step in steps).values()) == 3
        assert window.candidate_of(window.first - 1) is window.candidate_of(window.end) is None
        # The times of the last steps are on their way for two more.
        assert [window.is_open(window.end + late) for late in (-1, 0, 1, 2)] == [True] * 3 + [False]
    none = window_of({A: 3, B: 2}, num_steps=0)
    assert not none.is_open(0) and none.candidate_of(0) is None


@pytest.mark.parametrize("case", by_hand("windows"))
def test_windows_by_hand(case: dict[str, Any]) -> None:
    candidates = dict(zip((A, B), case.get("predicted_us", (100, 50)), strict=True))
    warm = {each for each in candidates if name_of(each) in case.get("warm", ())}
    window = window_of(candidates, warm=warm)
    for step, us in enumerate(case["times_us"]):
        num_exchanges, tokens = case.get("works", [(2, 4000)] * 6)[step]
        window.add_trial(step, Work(num_exchanges, num_exchanges * tokens, tokens))
        if us is not None:
            window.add_time(step, us)
    measured = window.comparison
    found = {
        "measured_us": {
            name_of(choice): pytest.approx(us)
            for choice, us in (measured.us if measured else {}).items()
        },
        "best": window.best and name_of(window.best),
        "kind": measured and measured.kind and list(measured.kind),
        "cost": pytest.approx(window.cost),
    }
    assert {name: found[name] for name in found.keys() & case.keys()} == {
        name: case[name] for name in found.keys() & case.keys()
    }
