"""The summary of many points as Markdown. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from monta_megatron.benchmark.summary import (
    FACTORS,
    LOSS_BELOW,
    PHASE,
    Key,
    Measured,
    measured_points,
    or_dash,
    summarise,
)
from monta_megatron.chains import CHAINS
from monta_megatron.quantities import counted


def summary_lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The whole summary in Markdown."""
    points = measured_points(reports)
    lines = [_where(reports)]
    if not points:
        return [*lines, "", f"Nothing was timed {PHASE.replace('_', ' + ')}."]
    same = {name: values for name, values in _factors(points).items() if len(set(values)) == 1}
    alike = "; ".join(f"{name} {values[0]}" for name, values in same.items() if values[0] != "-")
    lines += ["", f"All points, forward + backward: {alike}."]
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
    head = ["pick", "predicted ms", "ms", "error", "fastest measured", "ms", "regret"]
    rows = []
    for point, factors in zip(points, _varying(points), strict=True):
        pick, best = point.pick, point.best
        if pick is None:
            continue
        predicted_ms, pick_ms = point.predicted_ms(pick), point.times_ms[pick]
        rows.append(
            [
                *factors.values(),
                _name(pick),
                or_dash(predicted_ms, ".1f"),
                f"{pick_ms:.1f}",
                "-" if predicted_ms is None else f"{predicted_ms / pick_ms - 1:+.0%}",
                _name(best),
                f"{point.times_ms[best]:.1f}",
                f"{point.regret:.3f}",
            ]
        )
    return [
        *_markdown([*_varying(points)[0], *head], rows),
        "",
        f"Regret over {counted(figures['regret_points'], 'point')}: median "
        f"{figures['regret_median']:.3f}, worst {figures['regret_worst']:.3f}.",
    ]


def _error_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    chains = [chain for chain in CHAINS if any(point.errors(chain) for point in points)]
    rows = [
        [
            *factors.values(),
            *(
                " / ".join(f"{error:+.0%}" for error in point.errors(chain)) or "-"
                for chain in chains
            ),
        ]
        for point, factors in zip(points, _varying(points), strict=True)
    ]
    return [
        "Predicted over measured, by number of chunks.",
        "",
        *_markdown([*_varying(points)[0], *chains], rows),
        "",
        f"Over {figures['predictions']} predictions, without sign: median "
        f"{figures['error_median']:.0%}, largest {figures['error_largest']:.0%}.",
    ]


def _stock_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    head = ["auto", "stock ms", "auto ms", "times faster", "95% interval", "pairs"]
    rows = [
        [
            *factors.values(),
            f"{auto.chain} x{auto.num_chunks}",
            f"{point.stock.median_ms:.1f}",
            f"{auto.median_ms:.1f}",
            f"{auto.ratio_to_alltoall:.2f}",
            f"{auto.ratio_low:.2f} to {auto.ratio_high:.2f}"
            + (" (slower)" if auto.ratio_high < LOSS_BELOW else ""),
            str(point.repeats),
        ]
        for point, factors in zip(points, _varying(points), strict=True)
        for auto in [point.auto]
        if auto is not None
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
    return [*_markdown([*_varying(points)[0], *head], rows), "", ending]


def _factors(points: Sequence[Measured]) -> dict[str, list[str]]:
    return {name: [value_of(point) for point in points] for name, value_of in FACTORS.items()}


def _varying(points: Sequence[Measured]) -> list[dict[str, str]]:
    """For each point, the factors in which the points differ."""
    factors = {name: values for name, values in _factors(points).items() if len(set(values)) > 1}
    return [
        {name: values[position] for name, values in factors.items()}
        for position in range(len(points))
    ]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _name(key: Key) -> str:
    chain, num_chunks = key
    return f"{chain} x{num_chunks}"
