"""The summary of many points as Markdown. No torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common.units import counted
from monta_megatron.tools.bench.regret import Key, Regret
from monta_megatron.tools.bench.summary import (
    FACTORS,
    LOSS_BELOW,
    PHASE,
    REGRET_ABOVE,
    REGRET_SURELY_ABOVE,
    Measured,
    measured_points,
    or_dash,
    summarise,
)


def summary_lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The whole summary in Markdown."""
    points = measured_points(reports)
    lines = [_where(reports)]
    if not points:
        return [*lines, "", f"Nothing was timed {PHASE.replace('_', ' + ')}."]
    same = {name: values for name, values in _factors(points).items() if len(set(values)) == 1}
    shared = "; ".join(f"{name} {values[0]}" for name, values in same.items() if values[0] != "-")
    lines += ["", f"All points, forward + backward: {shared}."]
    figures = summarise(reports)
    if figures["regret_points"]:
        lines += ["", "## Regret", "", *_regret_table(points, figures)]
    if figures["predictions"]:
        lines += ["", "## Errors of the predictions", "", *_error_table(points, figures)]
    if figures["auto_points"]:
        lines += ["", "## auto against stock alltoall", "", *_stock_table(points, figures)]
    return lines


def _where(reports: Sequence[dict[str, Any]]) -> str:
    """Machine, versions and commits."""
    meta = reports[0]["meta"]
    versions, machine = meta["versions"], meta["machine"]
    device = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    commits = sorted({_short(report["meta"]["commit"]) for report in reports})
    return (
        f"{device}; torch {versions['torch']}, megatron-core {versions['megatron-core']}, "
        f"commit {', '.join(commits)}."
    )


def _short(commit: str | None) -> str:
    """The first 12 digits of a commit, and whether the source was changed."""
    digits, *dirty = (commit or "not known").split("-")
    return "-".join([digits[:12], *dirty])


def _regret_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    are_tuned = any(point.untuned_regret is not None for point in points)
    # Elsewhere the traffic was as the planner expects it.
    are_observed = any(
        point.observed_regret not in (None, point.untuned_regret) for point in points
    )

    def cells(point: Measured) -> list[str] | None:
        regret = point.regret
        if regret is None:
            return None
        predicted_ms = point.predicted_ms(regret.pick)
        return [
            *(_judged(point.untuned_regret) if are_tuned else []),
            *(_judged(point.observed_regret) if are_observed else []),
            _name(regret.pick),
            or_dash(predicted_ms, ".1f"),
            f"{regret.pick_ms:.1f}",
            "-" if predicted_ms is None else f"{predicted_ms / regret.pick_ms - 1:+.0%}",
            _name(regret.best),
            f"{regret.best_ms:.1f}",
            *_judged(regret)[1:],
        ]

    head = ["pick", "predicted ms", "ms", "error", "fastest measured", "ms", "regret", "95%"]
    said = _regret_line("Regret", "regret", figures)
    if are_tuned:
        head = ["tuned", *head[1:]]
        if are_observed:
            head = ["planned, observed", "regret", "95%", *head]
            said += _regret_line(" Planned for what was observed", "observed_regret", figures)
        head = ["planned", "regret", "95%", *head]
        said += _regret_line(" Planned, without tuning", "untuned_regret", figures)
    return [*_markdown(points, head, cells), "", said]


def _judged(regret: Regret | None) -> list[str]:
    """What was picked, its regret, and the interval."""
    if regret is None:
        return ["-"] * 3
    interval = "-" if regret.low is None else f"{regret.low:.3f} to {regret.high:.3f}"
    return [_name(regret.pick), f"{regret.ratio:.3f}", interval]


def _regret_line(what: str, name: str, figures: Mapping[str, Any]) -> str:
    return (
        f"{what} over {counted(figures[f'{name}_points'], 'point')}: median "
        f"{figures[f'{name}_median']:.3f}, worst {figures[f'{name}_worst']:.3f}; "
        f"{figures[f'{name}_clear']} over {REGRET_ABOVE} with the whole interval over "
        f"{REGRET_SURELY_ABOVE}."
    )


def _error_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    chains = [chain for chain in CHAINS if any(point.errors(chain) for point in points)]

    def cells(point: Measured) -> list[str]:
        errors = (point.errors(chain) for chain in chains)
        return [" / ".join(f"{error:+.0%}" for error in of_chain) or "-" for of_chain in errors]

    return [
        "Predicted over measured, by number of chunks.",
        "",
        *_markdown(points, chains, cells),
        "",
        f"Over {figures['predictions']} predictions, without sign: median "
        f"{figures['error_median']:.0%}, largest {figures['error_largest']:.0%}.",
    ]


def _stock_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    def cells(point: Measured) -> list[str] | None:
        auto = point.auto
        if auto is None:
            return None
        return [
            f"{auto.chain} x{auto.num_chunks}",
            f"{point.stock.median_ms:.1f}",
            f"{auto.median_ms:.1f}",
            f"{auto.ratio_to_alltoall:.2f}",
            f"{auto.ratio_low:.2f} to {auto.ratio_high:.2f}"
            + (" (slower)" if auto.ratio_high < LOSS_BELOW else ""),
            str(point.repeats),
        ]

    ending = (
        f"Of {counted(figures['auto_points'], 'point')}, {figures['auto_lost']} have their "
        f"whole interval under {LOSS_BELOW}."
    )
    if figures["auto_alltoall_points"]:
        ending += (
            f" Where auto chose alltoall ({figures['auto_alltoall_points']}), the median ratio is "
            f"{figures['auto_alltoall_ratio_median']:.3f}."
        )
    head = ["auto", "stock ms", "auto ms", "times faster", "95% interval", "repeats"]
    return [*_markdown(points, head, cells), "", ending]


def _factors(points: Sequence[Measured]) -> dict[str, list[str]]:
    return {name: [value_of(point) for point in points] for name, value_of in FACTORS.items()}


def _markdown(
    points: Sequence[Measured],
    head: Sequence[str],
    cells_of: Callable[[Measured], Sequence[str] | None],
) -> list[str]:
    """A row for each point that has cells, after the factors in which the points differ."""
    varying = {name: values for name, values in _factors(points).items() if len(set(values)) > 1}
    rows = [
        [*(values[position] for values in varying.values()), *cells]
        for position, cells in enumerate(map(cells_of, points))
        if cells is not None
    ]
    head = [*varying, *head]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _name(key: Key) -> str:
    chain, num_chunks = key
    return f"{chain} x{num_chunks}"
