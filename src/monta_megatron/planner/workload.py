"""What is exchanged and by whom: the layout of an exchange, its rows, and where they go."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from monta_megatron.chains import BoundChain, Chain
from monta_megatron.chains.chunks import blocks_for
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import BoundProgram, Pass, Policy, RowFormat
from monta_megatron.planner.layout import ParallelLayout, exchanges
from monta_megatron.planner.model import Model
from monta_megatron.planner.routing import Routing, UniformRouting

# Of fp32, in which copies of a row are summed at least.
LEAST_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is exchanged and by whom.

    Attributes:
        layout: layout of the exchange, as any of its ranks sees it.
        hidden_size: hidden size of a row.
        value_bytes: bytes of one hidden value.
        prob_bytes: bytes of one routing probability.
        routing: where tokens go.
        tokens_per_rank: tokens that each rank brings.
        longest_list: the longest list of experts seen, where it is longer than the routing's.
    """

    layout: Layout
    hidden_size: int
    value_bytes: int
    prob_bytes: int
    routing: Routing
    tokens_per_rank: int
    longest_list: int = 0

    @classmethod
    def of(
        cls, model: Model, layout: Layout, tokens_per_rank: int, routing: Routing | None = None
    ) -> "Workload":
        """A model's exchange, with the model's own router unless a routing is given."""
        return cls(
            layout=layout,
            hidden_size=model.hidden_size,
            value_bytes=model.value_bytes,
            prob_bytes=model.prob_bytes,
            routing=uniform_routing(model) if routing is None else routing,
            tokens_per_rank=tokens_per_rank,
        )

    def with_tokens(self, tokens_per_rank: int) -> "Workload":
        """The same exchange with another number of tokens on each rank."""
        return replace(self, tokens_per_rank=tokens_per_rank)

    def bind(self, chain: Chain, num_chunks: int, layout: Layout | None = None) -> BoundChain:
        """The chain bound to the expected rows of one rank.

        Args:
            chain: what runs.
            num_chunks: in how many chunks.
            layout: the rank's place; None for the first rank's.
        """
        layout = replace(self.layout, rank=0) if layout is None else layout
        counts = self.routing.counts(chain, layout, self.tokens_per_rank, blocks_for(num_chunks))
        return chain.bind(layout, counts, num_chunks)

    def lower(self, bound: BoundChain, pass_: Pass, policy: Policy) -> BoundProgram:
        """The program of one pass over the chain."""
        max_experts_per_token, sum_bytes = (
            self.routing.max_experts_per_token,
            max(LEAST_SUM_BYTES, self.value_bytes),
        )
        if bound.chain.rows == "tokens":
            max_experts_per_token = max(max_experts_per_token, self.longest_list)
        else:
            # Megatron reduces permuted tokens in the dtype of their probabilities.
            sum_bytes = max(sum_bytes, self.prob_bytes)
        row = RowFormat(
            hidden_size=self.hidden_size,
            value_bytes=self.value_bytes,
            prob_bytes=self.prob_bytes,
            sum_bytes=sum_bytes,
        )
        return lower(bound, pass_, row, max_experts_per_token, policy)


def workloads_of(
    model: Model,
    layout: ParallelLayout,
    ranks_per_node: int,
    tokens_per_rank: int | None = None,
    routing: Callable[[Layout], Routing] | None = None,
) -> list[Workload]:
    """One workload for every way in which the layout's exchanges lie on the nodes.

    Args:
        model: what is trained.
        layout: how the ranks are grouped.
        ranks_per_node: ranks joined by the fast tier.
        tokens_per_rank: None for the number that follows from the model's batch.
        routing: layout of an exchange -> its routing; None for the model's own router.
    """
    tokens = layout.tokens_per_rank(model) if tokens_per_rank is None else tokens_per_rank
    return [
        Workload.of(model, place, tokens, None if routing is None else routing(place))
        for place in exchanges(layout, model.num_experts, ranks_per_node)
    ]


def uniform_routing(model: Model) -> UniformRouting:
    """The model's router with every expert as likely as any other."""
    return UniformRouting(
        num_experts=model.num_experts,
        topk=model.moe_router_topk,
        num_groups=model.moe_router_num_groups or 1,
        group_topk=model.moe_router_group_topk or 1,
    )
