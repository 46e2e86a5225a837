"""Each rule of `monta doctor --run` on numbers worked out by hand."""

from dataclasses import replace

import pytest
from watched_iteration import CHANGE

from monta_megatron.tools.run_doctor.figures import (
    Choice,
    ExchangeFigures,
    Finding,
    LinkChange,
    MemoryFigures,
    RunFigures,
    WhatIf,
)
from monta_megatron.tools.run_doctor.report import RULES, RunReport, diagnose

# 100 ms that are well spread: nothing is busy for half of it.
EXCHANGE = ExchangeFigures(
    kind="measured",
    basis="exchange_rank_0.jsonl, 8 watched iterations, 50 to 400",
    chain="hierarchical_alltoall",
    num_chunks=4,
    exchange_ms=100.0,
    predicted_ms=80.0,
    busy_ms={"inter": 36.0, "intra": 32.0, "memory": 24.0, "host": 20.0},
    link_ms={"inter": 45.0, "intra": 40.0},
    link_over_predicted={"inter": 1.25, "intra": 1.25},
    calibrated_links=("inter", "intra"),
    avg_overload_factor=1.1,
    max_overload_factor=1.3,
    imbalance=0.05,
)
RAN = Choice(chain="hierarchical_alltoall", num_chunks=4, us=1_000.0, peak_bytes=2e9)
# Experts take a quarter of what the exchange takes, and gain nothing in the pipeline.
WHAT_IF = WhatIf(
    basis="model and cluster file",
    ran=RAN,
    fastest=RAN,
    eight_bits=replace(RAN, us=990.0),
    experts_us=250.0,
    unsplit=replace(RAN, us=1_250.0),
    split=replace(RAN, us=1_300.0),
    is_named=False,
    experts_asked=False,
    experts_pipelined=False,
)
RUN = RunFigures(exchange=EXCHANGE, iteration_ms=400.0, what_if=WHAT_IF)


def found(**changes: object) -> list[Finding]:
    """What is found where the exchange has other figures."""
    return diagnose(replace(RUN, exchange=replace(EXCHANGE, **changes)))  # type: ignore[arg-type]


def expected(**changes: object) -> list[Finding]:
    """Likewise, where the predictions are others."""
    return diagnose(replace(RUN, what_if=replace(WHAT_IF, **changes)))  # type: ignore[arg-type]


def test_nothing_holds_back_what_is_well_spread() -> None:
    assert diagnose(RUN) == []
    said = RunReport(run=RUN, iteration=None).text(80)
    assert "nothing that is known holds it back" in said
    assert max(map(len, said.splitlines())) <= 80
    # 100 of 400 ms, and 100 over 80.
    assert " ".join(said.split()).startswith(
        "exchange: hierarchical_alltoall in 4 chunks, 100 ms of an iteration, measured, 1.25x the "
        "predicted 80 ms; 400 ms a whole iteration, measured (25%)"
    )


def test_the_link_that_carries_most_is_named_with_its_rate() -> None:
    (finding,) = found(link_ms={"inter": 60.0, "intra": 40.0})
    assert (finding.name, finding.kind, finding.held_ms) == ("network", "measured", 60.0)
    # Measured over predicted is 1.25.
    assert "between nodes) is busy for 60% of the exchange, at 80% of the rate" in finding.says
    assert finding.rests_on == EXCHANGE.basis
    (finding,) = found(link_ms={"inter": 30.0, "intra": 51.0})
    assert (finding.name, finding.held_ms) == ("node link", 51.0)
    # Collectives that wait for each other are timed twice.
    (finding,) = found(link_ms={"inter": 150.0, "intra": 0.0})
    assert finding.held_ms == 100.0


def test_a_prediction_alone_is_called_one() -> None:
    exchange = replace(
        EXCHANGE,
        kind="predicted",
        exchange_ms=80.0,
        busy_ms={**EXCHANGE.busy_ms, "inter": 60.0},
        link_ms={},
        link_over_predicted={},
        avg_overload_factor=None,
        max_overload_factor=None,
        imbalance=None,
    )
    (finding,) = diagnose(replace(RUN, exchange=exchange))
    assert (finding.name, finding.kind, finding.held_ms) == ("network", "predicted", 60.0)
    assert "busy for 75% of the exchange; predicted of each alone" in finding.says


def test_what_is_tried_against_the_network_is_priced() -> None:
    link_ms = {"inter": 60.0, "intra": 40.0}
    run = replace(RUN, exchange=replace(EXCHANGE, link_ms=link_ms))
    other = Choice(chain="alltoall_dedup", num_chunks=2, us=750.0, peak_bytes=1e9)
    what_if = replace(WHAT_IF, is_named=True, fastest=other, eight_bits=replace(RAN, us=600.0))
    (finding,) = diagnose(replace(run, what_if=what_if))
    assert finding.advice[:2] == (
        "--moe-monta-chain auto: alltoall_dedup in 2 chunks takes 25% less time, predicted",
        "--moe-monta-wire-dtype fp8: 40% less time, predicted; it rounds what the experts get",
    )
    # auto has measured; it is not told to choose what it was free to choose.
    (finding,) = diagnose(replace(run, what_if=replace(what_if, is_named=False)))
    assert not any("auto" in advice for advice in finding.advice)
    # Nothing is priced, and nothing is promised.
    (finding,) = diagnose(replace(run, what_if=None))
    assert not any("%" in advice for advice in finding.advice)


def test_a_link_that_became_slower_is_named_with_its_ranks() -> None:
    noticed = LinkChange(change=CHANGE, basis="exchange_rank_0.jsonl, iteration 312")
    (finding,) = diagnose(replace(RUN, changes=(noticed,)))
    # Three quarters of the 45 ms.
    assert (finding.name, finding.held_ms) == ("slower link", 33.75)
    assert finding.says == f"{CHANGE.text}; 25% of its rate is left"
    assert finding.rests_on == "exchange_rank_0.jsonl, iteration 312"
    assert "network of ranks 1, 3" in finding.advice[0]


def test_changes_of_one_link_are_one_finding() -> None:
    """Exchanges that share a network notice the same change."""
    mild = LinkChange(change=replace(CHANGE, rate_ratio=0.4), basis="exchange_rank_4.jsonl")
    worst = LinkChange(change=CHANGE, basis="exchange_rank_0.jsonl")
    other = LinkChange(change=replace(CHANGE, resource="intra"), basis="exchange_rank_8.jsonl")
    findings = diagnose(replace(RUN, changes=(mild, worst, other)))
    assert [each.rests_on for each in findings] == [worst.basis, other.basis]
    assert findings[0].says.endswith(
        "25% of its rate is left; the worst of 2 exchanges that say so"
    )
    assert findings[1].says.endswith("25% of its rate is left")


def test_a_link_is_held_against_measured_rates_alone() -> None:
    """CPU ranks' node link waits for cores, and nobody has measured what a preset says."""
    slow = {"link_ms": {"inter": 60.0, "intra": 40.0}, "link_over_predicted": {"inter": 3.0}}
    (finding,) = found(**slow, calibrated_links=("intra",))
    assert (finding.name, finding.held_ms) == ("network", 60.0)
    assert "busy for 60% of the exchange; predicted" in finding.says
    # What was noticed is said all the same.
    noticed = LinkChange(change=CHANGE, basis="exchange_rank_0.jsonl")
    run = replace(RUN, exchange=replace(EXCHANGE, calibrated_links=()), changes=(noticed,))
    assert [each.name for each in diagnose(run)] == ["slower link"]


def test_a_link_slower_than_its_measured_rate() -> None:
    assert found(link_over_predicted={"inter": 1.25, "intra": 1.9}) == []
    (finding,) = found(link_over_predicted={"inter": 1.25, "intra": 4.0})
    # 40 ms instead of 10.
    assert (finding.name, finding.held_ms) == ("slower link", 30.0)
    assert "node link carries its messages at 25% of the rate" in finding.says
    assert "40 ms measured, 10 ms predicted" in finding.says
    assert "another job" in finding.advice[0] and "monta calibrate" in finding.advice[1]


def test_a_slower_link_and_what_it_would_hold_at_its_rate() -> None:
    both = {"link_ms": {"inter": 60.0, "intra": 8.0}, "link_over_predicted": {"inter": 3.0}}
    findings = found(**both)
    # 20 ms at its rate.
    assert [each.name for each in findings] == ["slower link", "network"]
    assert [each.held_ms for each in findings] == [pytest.approx(40.0), pytest.approx(20.0)]


def test_a_host_that_is_slower_than_the_links() -> None:
    (finding,) = found(busy_ms={"inter": 20.0, "intra": 8.0, "memory": 4.0, "host": 60.0})
    # 60 of the predicted 80, of the measured 100.
    assert (finding.name, finding.kind, finding.held_ms) == ("host", "predicted", 75.0)
    tries = " ".join(finding.advice)
    assert "--moe-monta-kernels" in tries and "--moe-monta-num-chunks 1" in tries
    # Launches that pass while the network carries more hold nothing.
    assert found(busy_ms={"inter": 61.0, "intra": 8.0, "memory": 4.0, "host": 60.0}) == []


def test_copies_that_take_longer_than_all_else() -> None:
    (finding,) = found(busy_ms={"inter": 20.0, "intra": 8.0, "memory": 48.0, "host": 10.0})
    assert (finding.name, finding.held_ms) == ("copies in memory", 60.0)


def test_experts_that_get_more_rows() -> None:
    (finding,) = found(avg_overload_factor=1.25, max_overload_factor=2.0)
    # The most loaded rank takes 1.25 times as long as a balanced one.
    assert finding.name == "imbalance of the experts"
    assert finding.held_ms == pytest.approx(20.0)
    assert "1.25 times the rows" in finding.says and "2.00 times" in finding.says
    assert any("--moe-aux-loss-coeff" in advice for advice in finding.advice)
    assert any("monta place" in advice for advice in finding.advice)


@pytest.mark.parametrize(
    ("slowest", "says", "advice"),
    [
        ({9: 1.0, 1: 0.75, 4: 0.25}, "wait for ranks 1, 9 nearly always", "node of ranks 1, 9"),
        ({9: 0.7}, "wait for rank 9 nearly always", "node of rank 9"),
        ({9: 0.5, 1: 0.5}, "not always the same ranks", "if sequences differ in length"),
    ],
)
def test_ranks_that_others_wait_for(slowest: dict[int, float], says: str, advice: str) -> None:
    (finding,) = found(imbalance=0.3, slowest_ranks=slowest)
    assert (finding.name, finding.held_ms) == ("ranks that wait", 30.0)
    assert says in finding.says and advice in finding.advice[0]


def test_ranks_wait_for_one_whose_experts_get_more_rows() -> None:
    findings = found(imbalance=0.6, avg_overload_factor=1.25, slowest_ranks={9: 1.0})
    assert [each.name for each in findings] == ["ranks that wait", "imbalance of the experts"]
    assert "whose experts get more rows" in findings[0].says
    assert findings[0].advice[0] == "balance the experts first"
    assert "node of rank 9" in findings[0].advice[1]


def test_a_rank_out_of_memory_comes_first() -> None:
    memory = MemoryFigures(
        out_of_memory="[rank3]: torch.OutOfMemoryError: CUDA out of memory.",
        basis="logs/run.log",
        exchange_bytes=2e9,
    )
    run = replace(RUN, exchange=replace(EXCHANGE, imbalance=0.3), memory=memory)
    first, second = diagnose(run)
    assert (first.name, first.held_ms, second.name) == ("memory", None, "ranks that wait")
    assert "[rank3]: torch.OutOfMemoryError" in first.says
    assert "the exchange holds up to 2 GB, predicted" in first.says


def test_a_host_out_of_memory_is_told_from_a_device() -> None:
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0"
    memory = MemoryFigures(out_of_memory=said, basis="logs/7.log", exchange_bytes=2e9)
    (finding,) = diagnose(replace(RUN, memory=memory))
    assert finding.says.endswith(said) and "--num-workers" in finding.advice[0]


def test_little_memory_is_left() -> None:
    memory = MemoryFigures(basis="logs/run.log", allocated_bytes=71e9, rank_bytes=80e9)
    assert diagnose(replace(RUN, memory=memory)) == []
    full = replace(memory, allocated_bytes=76e9)
    first, finding = diagnose(replace(RUN, exchange=replace(EXCHANGE, imbalance=0.3), memory=full))
    # A training is laid out to fill its memory: no time is lost by it.
    assert (first.name, finding.name, finding.held_ms) == ("ranks that wait", "memory", 0.0)
    assert finding.says == (
        "a rank had 76 GB allocated, 95% of the 80 GB that the cluster file gives it"
    )


def test_what_a_memory_limit_costs() -> None:
    fastest = replace(RAN, num_chunks=2, us=800.0, peak_bytes=3e9)
    run = replace(RUN, what_if=replace(WHAT_IF, fastest=fastest))
    (finding,) = diagnose(replace(run, memory=MemoryFigures(limit_bytes=2.5e9)))
    # A fifth of the exchange.
    assert (finding.name, finding.kind) == ("memory limit", "predicted")
    assert finding.held_ms == pytest.approx(20.0)
    assert finding.advice == ("--moe-monta-memory-limit-gb 3.03",)
    assert diagnose(replace(run, memory=MemoryFigures(limit_bytes=4e9))) == []


def test_experts_too_short_to_split() -> None:
    (finding,) = expected(experts_asked=True)
    assert (finding.name, finding.kind) == ("experts too short to split", "predicted")
    # 250 of 1,250 us of a layer are the bound; the planner gains none of them.
    assert finding.held_ms == 0.0
    assert finding.says.startswith("0.25 ms of experts beside 1 ms of exchange")
    assert "no split hides more than 20% of a layer" in finding.says
    assert finding.says.endswith("hierarchical_alltoall in 4 chunks, changes a layer by +4%")
    (finding,) = expected(experts_asked=True, split=None)
    assert finding.says.endswith("no chain can be split here")
    assert expected(experts_asked=True, experts_pipelined=True) == []
    (finding,) = expected(experts_asked=True, experts_us=4_000.0)
    assert finding.name == "exchange too short to split"


def test_experts_that_would_hide_the_exchange() -> None:
    # A tenth of a layer, an eighth of the exchange.
    (finding,) = expected(split=replace(RAN, us=1_125.0))
    assert finding.name == "experts outside the pipeline"
    assert finding.held_ms == pytest.approx(12.5)
    assert "a layer takes 10% less" in finding.says
    assert "--moe-monta-overlap-experts" in finding.advice[0]


def test_what_holds_most_comes_first() -> None:
    findings = found(imbalance=0.3, avg_overload_factor=2.0, link_ms={"inter": 60.0, "intra": 0.0})
    assert [each.held_ms for each in findings] == [60.0, 50.0, 30.0]


def test_what_holds_little_of_an_iteration_is_no_trouble() -> None:
    exchange = replace(EXCHANGE, imbalance=0.3)
    # 30 ms of 1,500 are 2%.
    assert len(diagnose(replace(RUN, exchange=exchange, iteration_ms=1_500.0))) == 1
    assert diagnose(replace(RUN, exchange=exchange, iteration_ms=1_501.0)) == []
    assert len(diagnose(replace(RUN, exchange=exchange, iteration_ms=None))) == 1


def test_every_rule_says_why_its_threshold() -> None:
    assert all(rule.least > 0 and rule.of and rule.reason and rule.judge.__doc__ for rule in RULES)


def test_logs_alone_say_nothing_of_an_exchange() -> None:
    assert diagnose(RunFigures(exchange=None, iteration_ms=10.0)) == []
