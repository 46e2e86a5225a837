"""Figures of a training: statistics by layer, watched iterations, a recorded iteration.

Imported only where they are asked for. Watched figures go to TensorBoard, W&B, the log and a file:
every rank of an exchange has them; Megatron's writers are on the last rank of the job, so they show
that rank's exchange; lines in the log come from the first rank of a pipeline stage, the file from
the first rank of each exchange. A recorded iteration keeps the times of every operation of the
first MoE layer's exchange, by events on a GPU, and writes them at its end.
"""

import atexit
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import utils
from torch.optim.optimizer import register_optimizer_step_post_hook

from monta_megatron.common.files import make_folder
from monta_megatron.common.import_hook import after_import
from monta_megatron.common.presets import versions
from monta_megatron.common.text import shown
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.pass_times import PassTimes
from monta_megatron.exchange.recording import RankRecording, RecordedPass, Span, spans_of
from monta_megatron.exchange.step_times import Clock, DeviceRecorder, HostRecorder, Taken
from monta_megatron.integration.options import Options
from monta_megatron.integration.ranks import Report, layers
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.online.drift import Change, DriftMonitor, MeasuredIteration
from monta_megatron.planner.online.tuning import Tuning
from monta_megatron.planner.online.tuning_report import plan_of_tuning, plan_path, tuning_table
from monta_megatron.planner.select import Selection

if TYPE_CHECKING:
    from monta_megatron.integration.dispatcher import MontaTokenDispatcher


# In the order in which they were given.
_functions: dict[Callable[[], None], None] = {}


def after_optimizer_steps(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function()` after each step of any optimizer of this process, inner ones too.

    Returns:
        A function that ends it, if it has not ended.
    """
    _watch()
    _functions[function] = None

    def stop() -> None:
        _functions.pop(function, None)

    return stop


@cache
def _watch() -> None:
    def call_all(*_: Any) -> None:
        for function in list(_functions):
            function()

    def after_replays(module: ModuleType) -> None:
        # A graph that replays a step (--optimizer-cuda-graph) calls no hook of torch's.
        wrapper: Any = module.OptimizerCudaGraphWrapper
        original = wrapper.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            call_all()
            return result

        wrapper.__call__ = call

    register_optimizer_step_post_hook(call_all)
    after_import("megatron.core.optimizer.optimizer_cuda_graph", after_replays)


@cache
def time_waits() -> None:
    """Time the waits in Megatron's 1F1B schedule, for the exchange whose pass was issued last.

    The schedule runs dispatch and combine of a micro-batch on a stream of their own, while another
    stream computes another micro-batch. Each node begins with a wait of its stream for the node
    before it in the same micro-batch:

        communicates   combine backward | dispatch forward -> dispatch backward | combine forward
        computes       attention forward | experts backward -> experts forward  | attention backward

    A wait of the stream that computes is the exposed part of the exchange that it waits for.
    """
    module: Any = utils
    if hasattr(module, "stream_acquire_context"):
        # Megatron-Core 0.16: a function of stream and event.
        module.stream_acquire_context = _timed(module.stream_acquire_context, lambda stream: stream)
    else:
        node = module.ScheduleNode
        node.stream_acquire_context = _timed(node.stream_acquire_context, attrgetter("stream"))


def _timed(acquire: Callable[..., Any], stream_of: Callable[[Any], Any]) -> Callable[..., Any]:
    @contextmanager
    def timed(first: Any, *more: Any) -> Iterator[None]:
        stream = stream_of(first)
        times = None if stream is utils.get_comm_stream() else PassTimes.last
        start = None if times is None else times.start_wait(stream)
        with acquire(first, *more):
            if times is not None and start is not None:
                times.end_wait(stream, start)
            yield

    return timed


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Statistics of the exchanges of one MoE layer on this rank.

    Attributes:
        layer_number: the layer's number in the model, from 1; None where it was given none.
        chain: the chain of the last micro-batch.
        num_chunks: its number of chunks.
        inter_bytes: payload that left this rank for other nodes.
        intra_bytes: payload that left it for other ranks on its node.
        choices: (chain, number of chunks) -> exchanges that ran by them, recomputed ones included.
        watched: the last watched iteration of the exchange that the layer belongs to, with all
            layers of its shape; None before the first one is known, and where nothing is watched.
    """

    layer_number: int | None
    chain: str
    num_chunks: int
    inter_bytes: int
    intra_bytes: int
    choices: Mapping[tuple[str, int], int]
    watched: "MeasuredIteration | None"


def layer_statistics() -> list[LayerStatistics]:
    """Of every MoE layer of this process that has our dispatcher, in the order of the model."""
    statistics = []
    for layer in layers():
        dispatcher = layer.token_dispatcher
        sent = dispatcher.monitor.bytes_by_resource()
        statistics.append(
            LayerStatistics(
                layer_number=layer.layer_number,
                chain=dispatcher.chain.name,
                num_chunks=dispatcher.num_chunks,
                inter_bytes=sent["inter"],
                intra_bytes=sent["intra"],
                choices=dict(dispatcher.monitor.choices),
                watched=dispatcher.watched,
            )
        )
    return statistics


# Exchanges of this process that are watched: layers of another shape have one of their own.
_num_published = 0


class Publisher:
    """Publishes the watched figures of one exchange.

    Args:
        watching: what is watched.
        group: the ranks of the exchange.
        options: of a layer.
        report: prints a message.
    """

    def __init__(
        self, watching: DriftMonitor, group: dist.ProcessGroup, options: Options, report: Report
    ) -> None:
        global _num_published
        _num_published += 1
        suffix = "" if _num_published == 1 else f"_{_num_published}"
        self._watching, self._options, self._report = watching, options, report
        self._prefix = f"monta{suffix}"
        self._published: MeasuredIteration | None = None
        # The line that is not in the log yet.
        self._line = ""
        self._path: Path | None = None
        first = dist.get_process_group_ranks(group)[0]
        if options.watch_out is not None and dist.get_rank() == first:
            self._path = Path(options.watch_out, f"exchange_rank_{first}{suffix}.jsonl")
            make_folder(self._path.parent, "moe_monta_watch_out")

    def after_iteration(self, number: int) -> None:
        """Publish the figures known by the end of an iteration, whose number is from 0."""
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

    def _to_writers(self, latest: MeasuredIteration, iteration: int) -> None:
        tensorboard, wandb = _writers()
        scalars = {f"{self._prefix}/{name}": each for name, each in scalars_of(latest).items()}
        if tensorboard is not None:
            for name, scalar in scalars.items():
                tensorboard.add_scalar(name, scalar, iteration)
        if wandb is not None:
            wandb.log(scalars, iteration)

    def _to_file(self, latest: MeasuredIteration, change: Change | None, iteration: int) -> None:
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


def scalars_of(watched: MeasuredIteration) -> dict[str, float]:
    """Plotted values of a watched iteration, by name."""
    return {
        **{f"{name}_ms": ms for name, ms in watched.exchange_ms.items()},
        "exchange_ms": sum(watched.exchange_ms.values()),
        **({} if watched.exposed_ms is None else {"exposed_ms": watched.exposed_ms}),
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


def line_of(watched: MeasuredIteration, iteration: int) -> str:
    """The line of the log."""
    passes = ", ".join(f"{name} {ms:.1f}" for name, ms in watched.exchange_ms.items())
    links = ", ".join(
        f"{RESOURCE_NAMES[link]} {ratio:.2f}x"
        for link, ratio in watched.link_over_predicted.items()
    )
    slowest = ", ".join(map(str, watched.slowest_ranks)) or "none"
    exposed = "" if watched.exposed_ms is None else f", {watched.exposed_ms:.1f} ms of it exposed"
    return (
        f"iteration {iteration}: exchange {sum(watched.exchange_ms.values()):.1f} ms ({passes})"
        f"{exposed}, "
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


def report_tuning(
    tuning: Tuning, selection: Selection, max_tokens: int, report: Report, plan_out: str | None
) -> None:
    """Report the result of a tuning, and write it as a plan if one is asked for.

    Args:
        tuning: which is over.
        selection: that can run, priced for the traffic of the tuning.
        max_tokens: the most tokens of a rank.
        report: prints a message.
        plan_out: file for the plan; None for none.
    """
    report(*tuning_table(tuning))
    if plan_out is None or not report.reports:
        return
    stage = parallel_state.get_pipeline_model_parallel_rank()
    path = plan_path(plan_out, stage, parallel_state.get_pipeline_model_parallel_world_size())
    try:
        plan_of_tuning(selection, tuning, max_tokens).save(path)
    except ValueError as error:
        # The training goes on.
        report(f"moe_monta_plan_out: {error}")
    else:
        report(f"the plan of this tuning: {path}")


_recorders: list["IterationRecorder"] = []


def record_iteration(dispatcher: "MontaTokenDispatcher") -> None:
    """Start the recording that the options ask for, in the first dispatcher of this process.

    Raises:
        ValueError: the folder cannot be made.
    """
    if not _recorders:
        make_folder(Path(dispatcher.options.record or ""), "moe_monta_record")
        _recorders.append(IterationRecorder(dispatcher))
        dispatcher.monitor.recorder = _recorders[0]


class IterationRecorder:
    """Records one iteration of one dispatcher; an `exchange.monitor.Recorder`."""

    def __init__(self, dispatcher: "MontaTokenDispatcher") -> None:
        self._dispatcher = dispatcher
        self._iteration = 1
        # Whether the layer has run in this iteration.
        self._has_run = False
        self._recorder: HostRecorder | DeviceRecorder | None = None
        # The pass under way, the operations that have begun in it, and how often each pass ran.
        self._pass_name = ""
        self._begun: set[int] = set()
        self._num_passes: Counter[str] = Counter()
        self._stop_watching = after_optimizer_steps(self._after_step)
        atexit.register(self._say_if_not_reached)

    def note(self, step: Step) -> None:
        """Record that a step happens now."""
        self._has_run = True
        if self._iteration != self._dispatcher.options.record_iteration:
            return
        if self._recorder is None:
            self._start()
        assert self._recorder is not None
        number = step.operation.number
        if step.action == "begin":
            if step.pass_name != self._pass_name or number in self._begun:
                self._pass_name, self._begun = step.pass_name, set()
                self._num_passes[step.pass_name] += 1
            self._begun.add(number)
        self._recorder.note(step._replace(pass_name=self._numbered(step.pass_name)))

    def watch(self, works: Sequence[dist.Work], pass_name: str, operation: int) -> list[dist.Work]:
        """Watch a collective that was just started; returns the object to wait for in its place."""
        if self._recorder is None:
            return list(works)
        return self._recorder.watch(works, self._numbered(pass_name), operation)

    def _start(self) -> None:
        """Begin with the layer's first operation, which all ranks of the exchange come to."""
        device = self._dispatcher.probs.device
        self._clock = Clock(self._dispatcher.tp_ep_group, device)
        self._recorder = HostRecorder() if device.type == "cpu" else DeviceRecorder()

    def _numbered(self, pass_name: str) -> str:
        """A name of its own for each run of a pass."""
        return f"{pass_name} {self._num_passes[pass_name] - 1}"

    def _after_step(self) -> None:
        """End the iteration, unless this is one more of the optimizers that step at its end."""
        if not self._has_run:
            return
        if self._recorder is not None:
            self._dispatcher.monitor.recorder = None
            self._stop_watching()
            self._write(self._recorder.take())
        self._iteration, self._has_run = self._iteration + 1, False

    def _say_if_not_reached(self) -> None:
        asked = self._dispatcher.options.record_iteration
        if self._iteration <= asked and self._dispatcher.layout.rank == 0:
            print(
                f"monta: nothing is recorded: the run ended in iteration {self._iteration}, before "
                f"the end of iteration {asked} (moe_monta_record_iteration)",
                flush=True,
            )

    def _write(self, taken: Taken) -> None:
        """Write this rank's file; a training does not end because that fails."""
        options, layout = self._dispatcher.options, self._dispatcher.layout
        folder = Path(options.record or "")
        try:
            self._recording(taken).save(folder)
        except ValueError as error:
            print(shown(f"monta: iteration {self._iteration} is not recorded: {error}"), flush=True)
            return
        if layout.rank == 0:
            ranks = dist.get_process_group_ranks(self._dispatcher.tp_ep_group)
            print(
                shown(
                    f"monta: iteration {self._iteration} of ranks {ranks[0]} to {ranks[-1]} is "
                    f"recorded; to draw it: monta timeline {folder}"
                ),
                flush=True,
            )

    def _recording(self, taken: Taken) -> RankRecording:
        dispatcher = self._dispatcher
        config, layout = dispatcher.config, dispatcher.layout
        emulated = EmulatedCluster.from_environment()
        spans_by_pass: dict[str, list[Span]] = {}
        for span in spans_of(taken.steps, taken.ends_us):
            spans_by_pass.setdefault(span.pass_name, []).append(span)
        passes = []
        for name, spans in spans_by_pass.items():
            pass_name, turn = name.rsplit(" ", 1)
            in_time = (
                replace(span.shifted(-self._clock.offset_us), pass_name=pass_name) for span in spans
            )
            passes.append(RecordedPass(turn=int(turn), spans=tuple(in_time)))
        is_device = isinstance(self._recorder, DeviceRecorder)
        return RankRecording(
            iteration=self._iteration,
            rank=dist.get_rank(),
            exchange=tuple(dist.get_process_group_ranks(dispatcher.tp_ep_group)),
            nodes=layout.nodes,
            chain=dispatcher.chain.name,
            num_chunks=dispatcher.num_chunks,
            tp=config.tensor_model_parallel_size,
            ep=layout.ep,
            etp=layout.etp,
            num_experts=config.num_moe_experts,
            topk=config.moe_router_topk,
            hidden_size=dispatcher.hidden_shape[-1],
            tokens=math.prod(dispatcher.hidden_shape[:-1]),
            dtype=str(config.params_dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name() if is_device else "CPU ranks",
            inter_mbit=None if emulated is None else emulated.inter_mbit,
            clock=self._clock.name,
            clock_error_us=self._clock.error_us,
            versions=versions(),
            passes=tuple(passes),
        )
