"""The communicators that are ours: their groups, and their budgets.

A budget is how many CTAs (thread blocks) a communicator may have: each keeps an SM busy and drives
a channel. The defaults follow NCCL's rule for sends and receives (docs/calibration.md).
"""

from typing import NamedTuple

OWN_GROUPS = ("node", "rail")


class Ctas(NamedTuple):
    """The budgets of the communicators of a rail and of a node."""

    rail: int
    node: int


DEFAULT_CTAS = Ctas(rail=4, node=16)
