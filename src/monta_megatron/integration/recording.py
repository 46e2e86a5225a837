"""Records an iteration of a training: when every operation of its first MoE layer's exchange ran.

Imported only where --moe-monta-record asks for it. Before and after that iteration nothing is
recorded; in it, every rank keeps times alone, by events on a GPU, and writes them at its end.
"""

import atexit
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from monta_megatron.common.files import make_folder
from monta_megatron.common.presets import versions
from monta_megatron.common.text import shown
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.recording import RankRecording, RecordedPass, Span, spans_of
from monta_megatron.exchange.step_times import Clock, DeviceRecorder, HostRecorder, Taken
from monta_megatron.integration.optimizer_steps import after_optimizer_steps

if TYPE_CHECKING:
    from monta_megatron.integration.dispatcher import MontaTokenDispatcher

_recorders: list["IterationRecorder"] = []


def record_iteration(dispatcher: "MontaTokenDispatcher") -> None:
    """Record what its options ask for, if it is the first dispatcher of this process.

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
        """Watch a collective that was just started; returns what to wait for in its place."""
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
