"""What an exchange did: bytes by stage and tier, and the order of starts and waits."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """One collective of one chunk was started, or waited for."""

    action: Literal["start", "wait"]
    walk: str
    stage: str
    chunk: int


@dataclass(kw_only=True)
class Monitor:
    """Filled by the executor as it issues collectives.

    Attributes:
        bytes_sent: (stage, tier) -> bytes of payload that left this rank for another one, counted
            from the tensors that were sent. Tiers: "inter" between nodes, "intra" inside one.
        record: every start and wait in the order of issue, or None while nobody asked for it.
    """

    bytes_sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    record: list[Step] | None = None

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that left this rank so far, over all stages."""
        totals = {"inter": 0, "intra": 0}
        for (_, tier), num_bytes in self.bytes_sent.items():
            totals[tier] += num_bytes
        return totals

    def note(self, action: Literal["start", "wait"], walk: str, stage: str, chunk: int) -> None:
        """Record a start or a wait, if a record is kept."""
        if self.record is not None:
            self.record.append(Step(action, walk, stage, chunk))
