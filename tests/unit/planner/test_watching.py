"""Which changes of a series last, by synthetic series; what an iteration took, by hand."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from monta_megatron.planner.online.drift import (
    BAND,
    NUM_IN_A_ROW,
    NUM_USUAL,
    PASS_NAMES,
    Change,
    DriftMonitor,
    lasting_change,
)

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.chain_policy import PlannedPolicy
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import uncalibrated
from monta_megatron.planner.online.decision import Decision, Outcome
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.planner.workload import Workload

LAYOUT = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))
# As ranks of the job.
RANKS = (4, 5, 6, 7)
ENOUGH = NUM_USUAL + NUM_IN_A_ROW


def make_policy(*chains: str, cluster: Cluster | None = None) -> PlannedPolicy:
    from monta_megatron.chains import CHAINS

    workload = Workload(
        layout=LAYOUT,
        hidden_size=1024,
        value_bytes=2,
        prob_bytes=4,
        routing=UniformRouting(num_experts=8, topk=4),
        tokens_per_rank=1,
    )
    return PlannedPolicy(
        chains=tuple(CHAINS[name] for name in chains),
        num_chunks=(2,),
        cluster=cluster or uncalibrated(LAYOUT, "H100"),
        workload=workload,
    )


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        ([4.0] * NUM_IN_A_ROW, 4.0),
        ([4.0] * (NUM_IN_A_ROW - 1) + [1.9], None),
        ([1.9] + [4.0] * (NUM_IN_A_ROW - 1), None),
        ([0.25] * NUM_IN_A_ROW, 0.25),
        ([4.0, 0.25] * (NUM_IN_A_ROW // 2), None),
        ([1.6] * NUM_IN_A_ROW, None),
        ([1 / 1.6] * NUM_IN_A_ROW, None),
    ],
)
def test_only_what_lasts_is_a_change(latest: list[float], expected: float | None) -> None:
    usual = [1.0, 1.1, 0.9, 1.0]
    assert lasting_change(usual + latest) == expected
    # Whatever the prediction is worth.
    assert lasting_change([7 * ratio for ratio in usual + latest]) == pytest.approx(expected)
    assert lasting_change(usual[1:] + latest) is None


def test_single_outliers_do_not_move_what_is_usual() -> None:
    assert lasting_change([1.0, 30.0, 1.0, 1.0, 0.1] + [4.0] * NUM_IN_A_ROW) == 4.0


class Run:
    """Iterations of an exchange on a rail and a node group, with given times per link."""

    def __init__(self, num_steps: int, *chains: str, cluster: Cluster | None = None) -> None:
        self.watching = DriftMonitor(num_steps, RANKS, LAYOUT)
        self.decision = Decision(
            make_policy(*(chains or ("hierarchical_alltoall",)), cluster=cluster),
            watching=self.watching,
        )
        self.changes: list[tuple[int, Change]] = []
        self.num_watched = 0
        self._sums: list[np.ndarray] = [np.zeros((4, 0), dtype=np.int64)]

    def iterate(
        self, inter_us: list[float], intra_us: list[float], exposed_us: int | None = None
    ) -> None:
        sums = np.zeros((4, 0), dtype=np.int64)
        if self.decision.is_watched:
            self.num_watched += 1
            link_us = np.array([inter_us, intra_us]).T
            pass_us = np.repeat(link_us.sum(axis=1, keepdims=True), 4, axis=1)
            counts = np.full((4, 4), 2)
            link_bytes = np.full((4, 2), [3_000, 5_000])
            rows = np.array([[10, 10], [10, 10], [30, 10], [10, 10]])
            sums = np.concatenate([pass_us, counts, link_us, link_bytes, rows], axis=1)
        # The outcome of an iteration is known at the end of the next one.
        exposed = None if exposed_us is None else np.array([exposed_us + us for us in (0, 9, 5, 7)])
        outcome = Outcome(None, self._sums[-1].astype(np.int64), exposed)
        number = self.decision.number
        self.decision.end_iteration(outcome if number else None, 512, 4)
        if self.watching.change is not None:
            self.changes.append((number, self.watching.change))
        self._sums.append(sums)


def test_a_slower_link_is_named_in_time_with_its_group() -> None:
    for num_steps in (16, 50):
        for shift in range(0, num_steps, 7):
            run = Run(num_steps)
            start = 5 * num_steps + shift
            for number in range(start + 2 * num_steps + 1):
                # The rail of the second position on the nodes.
                slow = 4 if number >= start else 1
                run.iterate([1_000, 1_000 * slow, 1_050, 1_010 * slow], [100, 110, 120, 100])
            ((known, change),) = run.changes
            assert start <= known <= start + 2 * num_steps
            assert change.resource == "inter" and change.factor == pytest.approx(4, rel=0.1)
            assert change.stages == ("stage alltoall between nodes, group rail",)
            assert change.ranks == (5, 7)
            assert start <= change.since <= start + num_steps
            assert "since iteration" in change.text and "ranks 5, 7" in change.text


def test_auto_plans_with_the_new_rate_and_back() -> None:
    run = Run(16, "hierarchical_alltoall", "alltoall")
    before = run.decision.agreed_config()["costs"]

    def iterate(slow: float) -> None:
        for _ in range(120):
            run.iterate([1_000 * slow] * 4, [100] * 4)

    iterate(1)
    assert run.changes == [] and run.decision.agreed_config()["costs"] == before
    iterate(4)
    assert run.watching.rate_ratios["inter"] == pytest.approx(0.25)
    assert "network x 0.25" in run.decision.agreed_config()["costs"]
    state = run.decision.state()
    assert state.rate_ratios == (pytest.approx(0.25), 1.0)
    resumed = Run(16, "hierarchical_alltoall", "alltoall")
    resumed.decision.resume(state)
    assert resumed.decision.agreed_config()["costs"] == run.decision.agreed_config()["costs"]
    iterate(1)
    assert [change.factor for _, change in run.changes] == pytest.approx([4, 0.25])
    assert run.decision.agreed_config()["costs"] == before


def test_the_node_link_is_told_from_the_network() -> None:
    run = Run(16)
    for number in range(200):
        slow = 4 if number >= 100 else 1
        # What waits for the node link is no slower network: the last to arrive does not wait.
        run.iterate([1_000, 1_000, 3_000, 3_000], [100, 100, 100 * slow, 110 * slow])
    ((_, change),) = run.changes
    assert change.resource == "intra" and change.ranks == (6, 7)
    assert change.stages == ("stage alltoall in node, group node",)


def test_cores_that_change_their_speed_are_no_alarm() -> None:
    """Speeds that change by up to 1.6 within minutes, and single iterations that are far slower."""
    for seed in range(20):
        random_ = random.Random(seed)
        run, speed, until = Run(50), 1.0, 0
        for number in range(2_000):
            if number >= until:
                speed, until = random_.uniform(1.0, 1.6), number + random_.randrange(20, 400)
            hiccup = random_.choice((2.5, 4, 10)) if random_.random() < 0.1 else 1.0
            us = [1_000 * speed * hiccup * random_.lognormvariate(0, 0.1) for _ in RANKS]
            run.iterate(us, [each / 3 for each in us])
        assert run.changes == [], seed
        # 2,000 / 50, and a look more often at the beginning and after what was far slower.
        assert 40 <= run.num_watched <= 40 + ENOUGH + 120


def test_a_band_between_what_cores_and_what_links_do() -> None:
    assert 1.6 < BAND < 4 and math.isclose(BAND, math.sqrt(1.6 * 4), rel_tol=0.25)


def test_figures_of_an_iteration() -> None:
    run = Run(1)
    for _ in range(3):
        run.iterate([1_000, 2_000, 1_000, 1_000], [100, 100, 200, 100])
    latest = run.watching.latest
    assert latest is not None and (latest.chain, latest.num_chunks) == ("hierarchical_alltoall", 2)
    # Of the first rank, which waited least, and of four ranks.
    assert latest.exchange_ms == dict.fromkeys(PASS_NAMES, 1.1)
    assert (latest.inter_gb, latest.intra_gb) == (12e-6, 20e-6)
    # 30 of 60 rows on one of four ranks, and 10 of 40.
    assert (latest.avg_overload_factor, latest.max_overload_factor) == (1.5, 2.0)
    assert latest.imbalance == pytest.approx(2_100 / 1_100 - 1)
    assert latest.slowest_ranks == (4, 7, 6)
    assert latest.over_predicted == pytest.approx(4.4 / latest.predicted_ms)
    # Of the rail of 4 and 6, or that of 5 and 7, of which one rank waited; likewise of the nodes.
    assert latest.link_ms == {"inter": 1.0, "intra": 0.1}
    assert set(latest.link_over_predicted) == {"inter", "intra"}
    # Each of the four passes ran twice.
    busy_ms = latest.predicted_busy_ms
    assert set(busy_ms) == {"inter", "intra", "memory", "host"} and min(busy_ms.values()) > 0
    assert max(busy_ms.values()) < latest.predicted_ms < sum(busy_ms.values())


def test_links_that_were_calibrated() -> None:
    preset = uncalibrated(LAYOUT, "H100")
    links = tuple(replace(link, kind="measured") for link in preset.links)
    measured = replace(preset, links=links)
    for cluster, calibrated in (
        (preset, ()),
        (measured, ("inter", "intra")),
        # Inside a node of CPU ranks collectives wait for cores.
        (replace(measured, copies_block_host=True), ("inter",)),
    ):
        run = Run(1, cluster=cluster)
        for _ in range(3):
            run.iterate([1_000] * 4, [100] * 4)
        latest = run.watching.latest
        assert latest is not None and latest.calibrated_links == calibrated


def test_a_device_that_has_not_come_to_a_pass_is_left_out() -> None:
    run = Run(1)
    run.iterate([0] * 4, [0] * 4)
    run.iterate([0] * 4, [0] * 4)
    run.iterate([0] * 4, [0] * 4)
    assert run.watching.latest is None


def test_nothing_is_watched_while_candidates_take_turns() -> None:
    watching = DriftMonitor(1, RANKS, LAYOUT)
    policy = make_policy("hierarchical_alltoall", "alltoall")
    decision = Decision(policy, 3, watching)
    nothing = Outcome(None, np.zeros((4, 0), dtype=np.int64))
    is_timed = []
    for number in range(6):
        decision.end_iteration(nothing if number else None, 512, 4)
        is_timed.append((decision.is_timed, decision.is_watched))
        if decision.has_to_settle:
            assert decision.tuning is not None
            decision.settle([decision.tuning.summary()])
    assert is_timed == [(True, False)] * 3 + [(False, False)] * 2 + [(True, True)]


def test_a_named_chain_is_watched_as_it_is() -> None:
    policy = replace(make_policy("hierarchical_alltoall"), named="as asked for", _tables={})
    choice = policy.choose(512)
    assert (choice.chain.name, choice.reason) == ("hierarchical_alltoall", "as asked for")
    assert policy.agreed_config()["chain"] == "hierarchical_alltoall"


def test_what_hides_the_exchange_is_learned() -> None:
    """4 passes of 2 micro-batches: 8 x 1,100 us on the fastest rank, 3,200 of them exposed."""
    run = Run(16, "alltoall", "alltoall_dedup", "hierarchical_alltoall")
    while run.watching.latest is None:
        assert run.decision.overlapped_compute_us == 0
        run.iterate([1_000] * 4, [100] * 4, exposed_us=1_600)
    latest = run.watching.latest
    assert (latest.exposed_ms, latest.hidden_us) == (1.6, (4_400 - 1_600) / 2)
    assert latest.exposed_share == pytest.approx(1.6 / 4.4)
    # An exchange is what a layer and micro-batch does: two of them are watched.
    assert run.decision.overlapped_compute_us == 1_400
    assert "beside 1,400 us of computation" in run.decision.choose(512).reason
    assert run.decision.agreed_config()["overlapped_compute_us"] == 1_400
    # Hidden as a whole: it hides at least as much as before, which is what is planned with.
    before = run.num_watched
    while run.num_watched < before + 4:
        run.iterate([500] * 4, [50] * 4, exposed_us=0)
    assert run.watching.latest.hidden_us == 2_200 / 2
    assert run.decision.overlapped_compute_us == 1_400
    again = run.decision.beginning()
    again.resume(run.decision.state())
    assert again.overlapped_compute_us == 1_400


def test_stated_overlap_is_kept() -> None:
    policy = replace(make_policy("alltoall", "alltoall_dedup"), overlapped_compute_us=700.0)
    decision = Decision(policy)
    assert decision.overlapped_compute_us == 700
    other = Decision(make_policy("alltoall", "alltoall_dedup"))
    other.overlapped_compute_us = 300.0
    decision.resume(other.state())
    assert decision.overlapped_compute_us == 700
    run = Run(16, "alltoall", "alltoall_dedup")
    run.decision = Decision(policy, watching=run.watching)
    while run.watching.latest is None:
        run.iterate([1_000] * 4, [100] * 4, exposed_us=1_600)
    assert run.watching.latest.exposed_ms is None
    assert run.decision.overlapped_compute_us == 700
