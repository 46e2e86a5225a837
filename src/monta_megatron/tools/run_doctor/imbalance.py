"""Imbalance: ranks that get more rows than others, and ranks for which the others wait."""

from collections.abc import Iterator

from monta_megatron.tools.run_doctor.figures import Finding, RunFigures
from monta_megatron.tools.run_doctor.wording import PLACE

# A balanced rank's rows times this.
OVERLOADED = 1.2
# Said to be the same ranks: late in so many of the iterations.
SAME_RANKS = 2 / 3


def overload(run: RunFigures, least: float) -> Iterator[Finding]:
    """Experts of a rank that get more rows than those of others."""
    of = run.exchange
    if of is None or of.avg_overload_factor is None or of.avg_overload_factor < least:
        return
    factor, most = of.avg_overload_factor, of.max_overload_factor
    yield Finding(
        name="imbalance of the experts",
        kind="measured",
        held_ms=of.exchange_ms * (1 - 1 / factor),
        says=f"the most loaded rank gets {factor:.2f} times the rows of a balanced one, and "
        f"{most:.2f} times at the most: exchange and experts end with it",
        rests_on=of.basis,
        advice=(
            "--moe-router-load-balancing-type aux_loss with a larger --moe-aux-loss-coeff; or, "
            "with sigmoid scores, --moe-router-enable-expert-bias",
            "--moe-expert-capacity-factor X, which drops tokens",
            PLACE,
        ),
    )


def waiting(run: RunFigures, least: float) -> Iterator[Finding]:
    """Ranks that come late to the exchange: always the same, or one or the other."""
    of = run.exchange
    if of is None or of.imbalance is None or of.imbalance < least:
        return
    same = sorted(rank for rank, part in of.slowest_ranks.items() if part >= SAME_RANKS)
    who = "not always the same ranks come late"
    advice = ["if sequences differ in length: pack them, or sort them by their tokens"]
    if same:
        late = f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}"
        who = f"the others wait for {late} nearly always"
        advice = [f"look at the device and node of {late}: clocks, heat, other processes"]
    if (of.avg_overload_factor or 0.0) >= OVERLOADED:
        who += "; a rank whose experts get more rows comes late by that alone"
        advice.insert(0, "balance the experts first")
    yield Finding(
        name="ranks that wait",
        kind="measured",
        held_ms=of.exchange_ms * of.imbalance,
        says=f"the exchange takes {of.imbalance:.0%} longer on the rank that waits most; {who}",
        rests_on=of.basis,
        advice=(*advice, "--moe-monta-record DIR, and monta timeline DIR: who waits for whom"),
    )
