"""The choice of chain and number of chunks: fixed by the user, or planned for the tokens at hand.

Every rank has to choose alike, so a choice depends only on what all know: its rule, on which they
agree once, and the most tokens on any rank and the longest list of experts, which are in the
gathered counts.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chunks import blocks_for
from monta_megatron.chains.count_format import count_widths
from monta_megatron.chains.layout import Layout
from monta_megatron.common import presets
from monta_megatron.common.hashes import hash_of
from monta_megatron.common.quantities import counted, gb_text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.search import NUM_CHUNKS, plan
from monta_megatron.planner.workload import Workload

# The preset whose figures are taken where nothing was measured.
UNCALIBRATED = "h100_8x_ndr"


@dataclass(frozen=True, kw_only=True)
class ChainChoice:
    """What runs.

    Attributes:
        chain: the chain.
        num_chunks: its number of chunks.
        reason: why.
    """

    chain: Chain
    num_chunks: int
    reason: str


class ChainPolicy(Protocol):
    """How a dispatcher chooses."""

    @property
    def chains(self) -> tuple[Chain, ...]:
        """Every chain that may be chosen."""

    @property
    def num_blocks(self) -> int:
        """Number of token blocks that are counted: at least as many as chunks."""

    def rule(self) -> dict[str, Any]:
        """What every rank has to agree on, as plain values."""

    def decide(self, max_tokens: int, longest_list: int = 0) -> ChainChoice:
        """What runs if no rank has more than `max_tokens` tokens, with no list of experts longer.

        Padding and dropping may make lists longer or shorter than top-k; 0 says nothing of them.
        """


@dataclass(frozen=True, kw_only=True)
class FixedPolicy:
    """A fixed chain and number of chunks, whatever the number of tokens."""

    decision: ChainChoice

    @property
    def chains(self) -> tuple[Chain, ...]:
        """See `ChainPolicy`."""
        return (self.decision.chain,)

    @property
    def num_blocks(self) -> int:
        """See `ChainPolicy`."""
        return blocks_for(self.decision.num_chunks)

    def rule(self) -> dict[str, Any]:
        """See `ChainPolicy`."""
        return {"chain": self.decision.chain.name, "num_chunks": self.decision.num_chunks}

    def decide(self, max_tokens: int, longest_list: int = 0) -> ChainChoice:
        """See `ChainPolicy`."""
        return self.decision


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedPolicy:
    """A plan for every range of tokens, made when it is first needed.

    Attributes:
        cluster: the cluster whose costs are used.
        workload: what is exchanged; its number of tokens is replaced.
        chains: the chains that may be chosen.
        num_chunks: the numbers of chunks that may be chosen.
        memory_limit_bytes: limit on what an exchange holds on a rank. Where every chain is expected
            to hold more, the one that holds the least is chosen: a training that has come to larger
            batches goes on.
    """

    cluster: Cluster
    workload: Workload
    chains: tuple[Chain, ...]
    num_chunks: tuple[int, ...] = NUM_CHUNKS
    memory_limit_bytes: float | None = None
    _decisions: dict[tuple[int, int], ChainChoice] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """See `ChainPolicy`."""
        return blocks_for(max(self.num_chunks))

    def rule(self) -> dict[str, Any]:
        """See `ChainPolicy`."""
        return {
            "chain": "auto",
            "chains": [chain.name for chain in self.chains],
            "num_chunks": list(self.num_chunks),
            "memory_limit_bytes": self.memory_limit_bytes,
            "cluster": self.cluster.name,
            # A hash, because the costs are kilobytes, too much to show in a message.
            "hash of the costs": hash_of({"costs": repr(self.cluster)}),
        }

    def decide(self, max_tokens: int, longest_list: int = 0) -> ChainChoice:
        """See `ChainPolicy`."""
        routing = self.workload.routing
        if longest_list <= routing.max_experts_per_token:
            longest_list = 0
        key = bucket_of(max_tokens), min(bucket_of(longest_list), routing.num_experts)
        if key not in self._decisions:
            self._decisions[key] = self._plan(*key)
        return self._decisions[key]

    def _plan(self, tokens: int, longest_list: int) -> ChainChoice:
        found = plan_for(self, tokens, longest_list)
        assert found.chosen is not None and found.chosen.peak_bytes is not None, "it was priced"
        lists = f" with up to {counted(longest_list, 'expert')} each" if longest_list > 1 else ""
        doubtful = ", whose calibration is doubtful," if self.cluster.doubts else ""
        return ChainChoice(
            chain=CHAINS[found.chain],
            num_chunks=found.num_chunks,
            reason=f"planned on {self.cluster.name}{doubtful} for up to "
            f"{counted(tokens, 'token')} per rank{lists}: {found.reason}; holds up to "
            f"{gb_text(found.chosen.peak_bytes)}",
        )


def plan_for(choice: PlannedPolicy, tokens: int, longest_list: int = 0) -> Plan:
    """The plan behind a choice for `tokens` tokens per rank; see `Workload`."""
    return plan(
        replace(choice.workload, tokens_per_rank=tokens, longest_list=longest_list),
        choice.cluster,
        chains=[chain.name for chain in choice.chains],
        num_chunks=choice.num_chunks,
        memory_limit_bytes=choice.memory_limit_bytes,
        or_least=True,
        # The chain is chosen after the gather, which therefore holds what any of the chains needs.
        num_exchanged_counts=sum(
            count_widths(choice.chains, choice.workload.layout, choice.num_blocks)
        ),
    )


def bucket_of(num_tokens: int) -> int:
    """Round up to a half-octave step (1, 2, 3, 4, 6, 8, 12, ...), so that few plans are made."""
    if num_tokens <= 2:
        return max(num_tokens, 1)
    octave = 1 << (num_tokens - 1).bit_length() - 1
    return octave * 3 // 2 if num_tokens <= octave * 3 // 2 else octave * 2


def chains_for(layout: Layout) -> tuple[Chain, ...]:
    """The chains that can run on a layout."""
    return tuple(chain for chain in CHAINS.values() if chain.incompatibility(layout) is None)


@cache
def uncalibrated(layout: Layout) -> Cluster:
    """Published figures of a common cluster, in the absence of measured ones: those of a preset.

    Nothing is known of the memory of a rank.
    """
    ranks_per_node = math.ceil(len(layout.nodes) / layout.num_nodes)
    return replace(
        load_cluster(presets.find("clusters", UNCALIBRATED)),
        name="an uncalibrated cluster",
        num_nodes=layout.num_nodes,
        ranks_per_node=ranks_per_node,
        nics_per_node=ranks_per_node,
        memory_gb_per_rank=None,
    )
