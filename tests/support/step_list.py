"""The steps of an exchange in the order of issue."""

from collections.abc import Sequence

import torch

from monta_megatron.exchange.monitor import Step


class StepList(list[Step]):
    """Every step that was noted; an `exchange.monitor.Recorder` that takes no times."""

    def note(self, step: Step) -> None:
        self.append(step)

    def watch(
        self, works: Sequence[torch.distributed.Work], pass_name: str, operation: int
    ) -> list[torch.distributed.Work]:
        return list(works)
