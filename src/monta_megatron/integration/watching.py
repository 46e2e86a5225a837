"""Where the figures of watched iterations go: TensorBoard, W&B, the log, a file.

Imported where an exchange is watched. Every rank of an exchange has its figures. Megatron's writers
are on the last rank of the job, so they show that rank's exchange; lines in the log come from the
first rank of a pipeline stage, the file from the first rank of each exchange.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from monta_megatron.common.files import make_folder
from monta_megatron.integration.options import Options
from monta_megatron.integration.reports import Report
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.online.drift import Change, WatchedIteration, Watching

# Exchanges of this process that are watched: layers of another shape have one of their own.
_num_published = 0


class Publisher:
    """Publishes what is watched of one exchange.

    Args:
        watching: what is watched.
        group: the ranks of the exchange.
        options: of a layer.
        report: prints a message.
    """

    def __init__(
        self, watching: Watching, group: dist.ProcessGroup, options: Options, report: Report
    ) -> None:
        global _num_published
        _num_published += 1
        suffix = "" if _num_published == 1 else f"_{_num_published}"
        self._watching, self._options, self._report = watching, options, report
        self._prefix = f"monta{suffix}"
        self._published: WatchedIteration | None = None
        # What is not in the log yet.
        self._line = ""
        self._path: Path | None = None
        first = dist.get_process_group_ranks(group)[0]
        if options.watch_out is not None and dist.get_rank() == first:
            self._path = Path(options.watch_out, f"exchange_rank_{first}{suffix}.jsonl")
            make_folder(self._path.parent, "moe_monta_watch_out")

    def after_iteration(self, number: int) -> None:
        """Publish what has become known by the end of an iteration, whose number is from 0."""
        latest, change = self._watching.latest, self._watching.change
        if latest is not None and latest is not self._published:
            self._published = latest
            ended, log_interval = _of_megatron(number)
            # That of Megatron, which counts from 1 and goes on counting where a training resumes.
            iteration = ended - (number - latest.iteration)
            self._to_writers(latest, iteration)
            self._to_file(latest, change, iteration)
            self._line = line_of(latest, iteration)
            if change is not None:
                plans = f"; auto plans with {change.rate_ratio:.0%} of its rate from here on"
                self._report(change.text + plans * (self._options.named_chain is None))
        if self._line and self._options.watch_log:
            ended, log_interval = _of_megatron(number)
            if ended % log_interval == 0:
                self._report(self._line)
                self._line = ""

    def _to_writers(self, latest: WatchedIteration, iteration: int) -> None:
        tensorboard, wandb = _writers()
        scalars = {f"{self._prefix}/{name}": each for name, each in scalars_of(latest).items()}
        if tensorboard is not None:
            for name, scalar in scalars.items():
                tensorboard.add_scalar(name, scalar, iteration)
        if wandb is not None:
            wandb.log(scalars, iteration)

    def _to_file(self, latest: WatchedIteration, change: Change | None, iteration: int) -> None:
        if self._path is None:
            return
        noticed = None if change is None else {**asdict(change), "text": change.text}
        document = {**asdict(latest), "iteration": iteration, "change": noticed}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(document) + "\n")
        except OSError as error:
            # The training goes on.
            self._report(f"moe_monta_watch_out: {self._path}: cannot be written: {error.strerror}")
            self._path = None


def scalars_of(watched: WatchedIteration) -> dict[str, float]:
    """What a plot shows of a watched iteration, by name."""
    return {
        **{f"{name}_ms": ms for name, ms in watched.exchange_ms.items()},
        "exchange_ms": sum(watched.exchange_ms.values()),
        "between_nodes_gb": watched.inter_gb,
        "inside_nodes_gb": watched.intra_gb,
        "avg_overload_factor": watched.avg_overload_factor,
        "max_overload_factor": watched.max_overload_factor,
        "imbalance": watched.imbalance,
        "measured_over_predicted": watched.over_predicted,
        **{
            f"{RESOURCE_NAMES[link].replace(' ', '_')}_measured_over_predicted": ratio
            for link, ratio in watched.link_over_predicted.items()
        },
    }


def line_of(watched: WatchedIteration, iteration: int) -> str:
    """The line of the log."""
    passes = ", ".join(f"{name} {ms:.1f}" for name, ms in watched.exchange_ms.items())
    links = ", ".join(
        f"{RESOURCE_NAMES[link]} {ratio:.2f}x"
        for link, ratio in watched.link_over_predicted.items()
    )
    slowest = ", ".join(map(str, watched.slowest_ranks)) or "none"
    return (
        f"iteration {iteration}: exchange {sum(watched.exchange_ms.values()):.1f} ms ({passes}), "
        f"{watched.inter_gb:.3g} GB between nodes, {watched.intra_gb:.3g} GB inside, overload "
        f"factor {watched.avg_overload_factor:.2f} (max {watched.max_overload_factor:.2f}), "
        f"slowest ranks {slowest} (imbalance {watched.imbalance:.0%}), "
        f"{watched.over_predicted:.2f}x predicted" + f" ({links})" * bool(links)
    )


def _writers() -> tuple[Any, Any]:
    """Megatron's TensorBoard writer and W&B, each None where there is none."""
    try:
        from megatron.training import global_vars
    except ImportError:
        return None, None
    return global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()


def _of_megatron(number: int) -> tuple[int, int]:
    """The iteration under way, from 1, and the interval of its log; our own outside its loop."""
    try:
        from megatron.training import global_vars

        args = global_vars.get_args()
        return args.curr_iteration + 1, args.log_interval
    except (ImportError, AssertionError, AttributeError):
        return number + 1, 1
