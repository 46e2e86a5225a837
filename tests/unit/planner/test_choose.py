"""Candidates and trials by number; prices are given by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from clusters import preset, shape_of

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.core import Choice
from monta_megatron.planner import plan as planner_plan
from monta_megatron.planner.choose import STOCK, Planner, half_octave
from monta_megatron.planner.plan import NUM_CHUNKS
from monta_megatron.planner.tuning import TuningWindow, Workload

HIERARCHICAL, DEDUP = "hierarchical_alltoall", "alltoall_dedup"
CLUSTER = preset("h100_8x_ndr")

# us of a chain in 1, 2, 4 and 8 chunks.
PRICES = {
    "alltoall": (100.0,),
    HIERARCHICAL: (60.0, 50.0, 55.0, 70.0),
    DEDUP: (90.0, 80.0, 85.0, 95.0),
}
Make = Callable[..., Planner]


def h(num_chunks: int, splits: bool = False, chain: str = HIERARCHICAL) -> Choice:
    return Choice(chain=chain, num_chunks=num_chunks, splits_experts=splits)


def d(num_chunks: int, splits: bool = False) -> Choice:
    return h(num_chunks, splits, DEDUP)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a planner with these prices, and peaks where they are not 100 bytes."""

    def planner(
        prices: dict[str, Any] = PRICES, peaks: dict[Any, float] | None = None, **fields: Any
    ) -> Planner:
        def price(_: object, __: object, chain: Chain, num_chunks: int) -> Any:
            choice = h(num_chunks, chain=chain.name)
            total_us = prices[chain.name][NUM_CHUNKS.index(num_chunks)]
            return SimpleNamespace(
                chain=chain,
                choice=choice,
                total_us=total_us,
                peak_bytes=(peaks or {}).get((chain.name, num_chunks), 100.0),
                times=choice,
                rank=(round(total_us, 1), chain.name != "alltoall", len(chain.stages), num_chunks),
                busiest=lambda: ("network", 10.0),
            )

        monkeypatch.setattr(planner_plan, "price", price)
        fields = {"num_chunks": NUM_CHUNKS, "shape": shape_of(16), "cluster": CLUSTER} | fields
        return Planner(chains=tuple(CHAINS[name] for name in prices), **fields)

    return planner


def test_a_half_octave_of_tokens_is_priced_once(make: Make) -> None:
    sizes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 4096, 4097]
    octaves = [1, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 4096, 6144]
    assert [half_octave(tokens) for tokens in sizes] == octaves
    planner = make()
    assert planner.selection(3100) is planner.selection(4096) is not planner.selection(4097)


def test_stock_comes_first_then_the_best_predicted(make: Make) -> None:
    found = [(STOCK, 100), (h(2), 50), (h(4), 55), (h(1), 60), (h(8), 70), (d(2), 80), (d(4), 85)]
    found += [(d(1), 90), (d(8), 95)]
    for most in (1, 2, 4, 7, 8, 100):
        assert list(make().candidates(4096, most).items()) == found[:most]


def test_a_candidate_takes_at_most_half_or_1_gb_more_memory_than_stock(make: Make) -> None:
    """Both bounds stay, whatever their last bit; the next move up."""
    peaks = {(HIERARCHICAL, 2): 1e9 + 100.0000001, (HIERARCHICAL, 4): 1e9 + 102, (DEDUP, 1): 2e9}
    found = make(peaks=peaks).candidates(4096, 8)
    assert list(found) == [STOCK, h(2), h(1), h(8), d(2), d(4), d(8)]


def test_ties_go_to_the_plainer_chain_whatever_the_last_bit(make: Make) -> None:
    for noise in (1e-9, -1e-9):
        prices = {"alltoall": (100.0,), HIERARCHICAL: (50 + noise,) * 4, DEDUP: (50.0,) * 4}
        found = make(prices).candidates(4096, 8)
        assert list(found) == [STOCK, d(1), d(2), d(4), d(8), h(1), h(2), h(4)]


def test_the_last_two_split_the_experts_of_the_best_chain_of_tokens(make: Make) -> None:
    planner = make(splits_experts=True)
    found = [STOCK, h(2), h(4), h(1), h(8), d(2), h(2, True), h(4, True)]
    assert list(planner.candidates(4096, 8)) == found
    assert list(planner.candidates(4096, 4)) == [STOCK, h(2), *found[-2:]]
    assert list(planner.candidates(4096, 2)) == [STOCK, h(2, True)]
    assert planner.candidates(4096, 8)[h(4, True)] == 50
    # The best one that memory admits.
    large = dict.fromkeys(((HIERARCHICAL, chunks) for chunks in NUM_CHUNKS), 2e9)
    found = [STOCK, d(2), d(4), d(1), d(8), d(2, True), d(4, True)]
    assert list(make(peaks=large, splits_experts=True).candidates(4096, 8)) == found


@pytest.mark.parametrize(
    ("num_chunks", "splits", "found"),
    [
        (8, False, [STOCK, h(8), d(8)]),
        (8, True, [STOCK, h(8), d(8), h(8, True)]),
        (1, True, [STOCK, h(1), d(1)]),
    ],
)
def test_a_given_number_of_chunks_is_kept(
    make: Make, num_chunks: int, splits: bool, found: list[Choice]
) -> None:
    planner = make(num_chunks=(num_chunks,), splits_experts=splits)
    assert list(planner.candidates(4096, 8)) == found
    assert planner.pick(4096)[0] == found[-1 if num_chunks > 1 and splits else 1]


def test_the_pick_says_why(make: Make) -> None:
    start = "planned on H100, 8x InfiniBand NDR for up to 4,096 tokens per rank: 50 us, "
    end = "; holds up to 100 B"
    choice, why = make().pick(4000)
    assert choice == h(2) and why.startswith(f"{start}1.60x as fast as {d(2).name}, the next")
    assert why.endswith(end)
    choice, why = make(splits_experts=True).pick(4000)
    said = f"{start}without its experts, as {h(2).name}, the fastest chain of tokens{end}"
    assert (choice, why) == (h(4, True), said)


def test_a_given_choice_is_not_priced() -> None:
    def given(chain: str, num_chunks: int, splits: bool = True) -> Planner:
        return Planner(chains=(CHAINS[chain],), num_chunks=(num_chunks,), splits_experts=splits)

    assert given("alltoall", 1).fixed == STOCK and given(HIERARCHICAL, 2).fixed == h(2, True)
    assert given("alltoall_allgather", 2).fixed == h(2, chain="alltoall_allgather")
    assert given(DEDUP, 1, splits=False).num_blocks == 1
    assert given(DEDUP, 8).num_blocks == blocks_for(8)


A, B, C = STOCK, h(2), d(2)


def window_of(first: int = 0, num_steps: int = 6, predicted_us: Any = (100, 50)) -> TuningWindow:
    candidates = dict(zip((A, B, C), predicted_us, strict=False))
    return TuningWindow(candidates=candidates, first=first, num_steps=num_steps)


def run(
    window: TuningWindow, *times_us: int | None, workloads: Any = ((2, 4000),) * 6
) -> TuningWindow:
    """Run a window: the time of every step; its exchanges and tokens."""
    for place, us in enumerate(times_us):
        num_exchanges, tokens = workloads[place]
        workload = Workload(num_exchanges, half_octave(tokens))
        window.add_trial(window.first + place, workload)
        if us is not None:
            window.add_time(window.first + place, us)
    return window


@pytest.mark.parametrize("num_steps", [6, 7, 24, 25])
def test_rounds_are_in_phase_with_a_trial_of_each_candidate(num_steps: int) -> None:
    windows = [window_of(first, num_steps, (3, 2, 1)) for first in (100, 103, 107)]
    length = num_steps // 3
    for window in windows:
        steps = range(window.first, window.end)
        assert all(window.candidate_of(step) == (A, B, C)[step % length % 3] for step in steps)
        assert min(Counter(step % length for step in steps).values()) == 3
        assert window.candidate_of(window.first - 1) is window.candidate_of(window.end) is None
        # The times of the last steps are on their way for two more.
        assert [window.is_open(window.end + late) for late in (-1, 0, 1, 2)] == [True] * 3 + [False]
    assert not window_of(num_steps=0).is_open(0) and window_of(num_steps=0).candidate_of(0) is None


def test_the_least_time_but_of_the_warm_up_decides() -> None:
    """Extra time: (200 + 150 + 110 + 80 + 100 + 85) us are 9.0625 times 80, in 6 trials."""
    window = run(window_of(), 200, 150, 110, 80, 100, 85)
    assert window.measured_us == {A: 100, B: 80} and window.best == B
    assert window.cost == pytest.approx(725 / 80 - 6)
    # The warm-up is the fastest here.
    assert run(window_of(), 1, 2, 70, 80, 70, 80).best == A
    # A candidate that ran in an earlier window is warm.
    assert run(replace(window_of(), warm={B}), 1, 2, 70, 80).measured_us == {A: 70, B: 2}


def test_lost_trials_are_not_compared() -> None:
    window = run(window_of(), None, None, None, 90, 100, None)
    assert window.measured_us == {A: 100, B: 90} and window.best == B
    # B has lost all trials but the warm-up, so it cannot win.
    assert run(window_of(), 100, 1, 100, None, 100, None).best == A


def test_the_most_frequent_workload_is_compared() -> None:
    """Tokens by half octave: 3,100 and 4,096 are alike; with fewer exchanges 10 us are no win."""
    workloads = ((2, 4096), (2, 4096), (2, 3100), (1, 4096), (2, 4096), (2, 4000))
    window = run(window_of(), 100, 100, 100, 10, 100, 120, workloads=workloads)
    assert window.workload == (2, 4096) and window.measured_us == {A: 100, B: 120}
    assert window.best == A and window.cost == pytest.approx(0.2)
    # Of two that are as frequent, the larger.
    workloads = ((1, 64), (1, 64), (1, 64), (2, 64), (2, 64), (1, 64))
    assert run(window_of(), 9, 9, 9, 9, 9, 9, workloads=workloads).workload == (2, 64)


@pytest.mark.parametrize(
    ("b_us", "predicted_b_us", "best"),
    [(1010, 99.0, B), (1010, 101.0, A), (1011, 50.0, A), (991, 101.0, A), (1000, 100.04, A)],
)
def test_within_one_percent_the_better_predicted_wins(
    b_us: int, predicted_b_us: float, best: Choice
) -> None:
    """Predictions are rounded to 0.1 us; of equal ones the first by name of the chain wins."""
    window = window_of(predicted_us=(100, predicted_b_us))
    assert run(window, 1, 1, 1000, b_us, 1000, b_us).best == best


def test_without_a_timed_trial_nothing_wins() -> None:
    for window in (window_of(), run(window_of(), 100, 100), run(window_of(), *[None] * 6)):
        assert window.workload is window.best is None
        assert (window.measured_us, window.cost) == ({}, 0)
