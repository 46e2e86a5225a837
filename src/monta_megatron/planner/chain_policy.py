"""The policy by which chain and number of chunks are chosen: fixed, or planned for the tokens.

Every rank has to choose alike, so a choice depends only on what all know: the policy's rule, on
which they agree once, and the most tokens on any rank and the most experts of any token, which are
in the exchanged counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.common.rules import hash_of
from monta_megatron.common.units import counted, gb_text
from monta_megatron.core import Layout, Shape
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.cluster import Cluster

if TYPE_CHECKING:
    from monta_megatron.planner.chain_price import ChainPrice
    from monta_megatron.planner.select import Selection


@dataclass(frozen=True, kw_only=True)
class ChainChoice:
    """A chosen chain and number of chunks.

    Attributes:
        chain: the chain.
        num_chunks: its number of chunks.
        reason: why.
        benefit: what is gained over stock; None where nothing was priced.
    """

    chain: Chain
    num_chunks: int
    reason: str
    benefit: Benefit | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainPolicy:
    """Policy by which a dispatcher chooses.

    Attributes:
        chains: the chains that may be chosen.
        num_chunks: the numbers of chunks that may be chosen.
    """

    chains: tuple[Chain, ...]
    num_chunks: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Number of token blocks that are counted: at least as many as chunks."""
        return blocks_for(max(self.num_chunks))

    def agreed_config(self) -> dict[str, Any]:
        """Values that every rank has to agree on."""
        raise NotImplementedError

    def choose(self, max_tokens: int, max_experts_per_token: int = 0) -> ChainChoice:
        """Choice if no rank has more than `max_tokens` tokens, none of them with more experts.

        Padding and dropping may give a token more or fewer experts than top-k; 0 says nothing.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedPolicy(ChainPolicy):
    """One chain in one number of chunks, whatever the number of tokens; `reason` says why."""

    reason: str

    def agreed_config(self) -> dict[str, Any]:
        """See `ChainPolicy`."""
        return {"chain": self.chains[0].name, "num_chunks": self.num_chunks[0]}

    def choose(self, max_tokens: int, max_experts_per_token: int = 0) -> ChainChoice:
        """See `ChainPolicy`."""
        return ChainChoice(chain=self.chains[0], num_chunks=self.num_chunks[0], reason=self.reason)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedPolicy(ChainPolicy):
    """A selection for every range of tokens, made when it is first needed.

    Attributes:
        cluster: the cluster whose costs are used.
        shape: what is exchanged; its number of tokens is replaced.
    """

    cluster: Cluster
    shape: Shape

    def agreed_config(self) -> dict[str, Any]:
        """See `ChainPolicy`."""
        return {
            "chain": "auto",
            "chains": [chain.name for chain in self.chains],
            "num_chunks": list(self.num_chunks),
            "cluster": self.cluster.name,
            "kernels": self.cluster.kernels,
            # A hash, because the costs are kilobytes, too much to show in a message.
            "hash of the costs": hash_of({"costs": repr(self.cluster)}),
        }

    def choose(self, max_tokens: int, max_experts_per_token: int = 0) -> ChainChoice:
        """See `ChainPolicy`."""
        return self.table.choose(max_tokens, max_experts_per_token)

    @cached_property
    def table(self) -> "ChoiceTable":
        """Table of choices; made once."""
        return ChoiceTable(policy=self)

    def selection(self, tokens: int, max_experts_per_token: int = 0) -> "Selection":
        """Selection for `tokens` tokens per rank; see `Shape`."""
        # A named chain prices nothing.
        from monta_megatron.planner.select import select_chain

        return select_chain(
            replace(self.shape, tokens_per_rank=tokens),
            self.cluster,
            chains=[chain.name for chain in self.chains],
            num_chunks=self.num_chunks,
        )


def _as_selected(selection: "Selection") -> "tuple[ChainPrice, str]":
    return selection.price, selection.reason


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceTable:
    """Choices by range of tokens; entries are made when first needed.

    Attributes:
        policy: which selects.
        pick: what is run of a selection, and why.
    """

    policy: PlannedPolicy
    pick: "Callable[[Selection], tuple[ChainPrice, str]]" = _as_selected
    _choices: dict[tuple[int, int], ChainChoice] = field(default_factory=dict)

    def choose(self, max_tokens: int, max_experts_per_token: int = 0) -> ChainChoice:
        """See `ChainPolicy`."""
        key = self.key(max_tokens, max_experts_per_token)
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

    def key(self, max_tokens: int, max_experts_per_token: int) -> tuple[int, int]:
        """The most tokens of a rank and experts of a token for which the entry is made."""
        routing = self.policy.shape.routing
        if max_experts_per_token <= routing.max_experts_per_token:
            max_experts_per_token = 0
        most_experts = min(bucket_of(max_experts_per_token), routing.num_experts)
        return bucket_of(max_tokens), most_experts

    def _choose(self, tokens: int, most_experts: int) -> ChainChoice:
        cluster, selection = self.policy.cluster, self.policy.selection(tokens, most_experts)
        price, why = self.pick(selection)
        of_token = f" with up to {counted(most_experts, 'expert')} each" if most_experts > 1 else ""
        doubtful = ", whose calibration is doubtful," if cluster.doubts else ""
        return ChainChoice(
            chain=price.chain,
            num_chunks=price.num_chunks,
            reason=f"planned on {cluster.name}{doubtful} for up to "
            f"{counted(tokens, 'token')} per rank{of_token}: {price.total_us:,.0f} us, {why}; "
            f"holds up to {gb_text(price.peak_bytes)}",
            # It says what is predicted.
            benefit=selection.benefit if self.pick is _as_selected else None,
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
