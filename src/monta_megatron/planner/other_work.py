"""What other work leaves over of an exchange that was measured, by the rule that ranks predictions.

An equal part of the work lies beside the program of each pass; see `schedule`. Programs are taken
to be as much longer or shorter than predicted as the whole exchange is by what was measured. What
runs around them, which nothing hides, and what the work loses to the exchange, stay as predicted.
So what takes as long as predicted leaves over what was predicted, and without other work all of it.
"""

from dataclasses import dataclass

from monta_megatron.common.rules import NonNegativeFloat
from monta_megatron.planner.chain_price import ChainPrice


@dataclass(frozen=True, kw_only=True)
class OtherWork:
    """Other work beside an exchange, and what was predicted of both.

    Attributes:
        part_us: of the work, beside each pass.
        program_us: [passes] the program of each.
        total_us: the exchange.
        exposed_us: what is left over of it.
    """

    part_us: NonNegativeFloat
    program_us: tuple[NonNegativeFloat, ...]
    total_us: NonNegativeFloat
    exposed_us: NonNegativeFloat

    @property
    def beside_us(self) -> float:
        """The work beside all passes."""
        return self.part_us * len(self.program_us)

    def left_over_us(self, us: float) -> float:
        """What is left over of an exchange that takes `us`."""
        programs_us = sum(self.program_us)
        longer = max(programs_us + us - self.total_us, 0.0) / programs_us if programs_us else 1.0
        more_us = (
            max(longer * program_us - self.part_us, 0.0) - max(program_us - self.part_us, 0.0)
            for program_us in self.program_us
        )
        return max(self.exposed_us + sum(more_us), 0.0)


def other_work_of(price: ChainPrice) -> OtherWork | None:
    """What runs beside an exchange that was priced; None for nothing."""
    if price.beside_us == 0:
        return None
    return OtherWork(
        part_us=price.beside_us / len(price.passes),
        program_us=tuple(pass_.schedule.total_us for pass_ in price.passes),
        total_us=price.total_us,
        exposed_us=price.exposed_us,
    )


def left_over_us(us: float, other_work: OtherWork | None) -> float:
    """What is left over of an exchange that takes `us`: all of it where there is no other work."""
    return us if other_work is None else other_work.left_over_us(us)
