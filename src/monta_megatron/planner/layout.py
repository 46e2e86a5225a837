"""Parallel layouts of a model, the shapes of their exchanges, and the ranks that are priced.

One rank stands for all that do the same. Two ranks move the same number of bytes in every stage of
every chain if

- the routing is even: a rank has as many rows for any peer as for any other, and
- in every group, each of them has as many peers on its node as the other.

On even nodes in order all ranks are such. Elsewhere, few are not: of 256 consecutive ranks on nodes
of 72, those on the first, the last and the other nodes.

Notation: S = ranks of the exchange.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from monta_megatron.chains.chain import MOST_TOKENS
from monta_megatron.common.rules import PositiveInt, require
from monta_megatron.core import FLAT_GROUPS, Layout, Routing, Shape
from monta_megatron.planner.model import HYBRID_PATTERNS, Model, Reader
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.planner.training import Training, settings_of, training_of

# Field of the layout -> Megatron's argument. All are passed on, because Megatron's defaults differ:
# without an ETP it takes ETP = TP.
PARALLEL_ARGUMENTS = {
    "tp": "tensor-model-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of Megatron's parallel groups.

    Attributes:
        world_size: total number of ranks.
        tp: tensor parallel size of the attention, with sequence parallelism.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        cp: context parallel size.
        pp: pipeline parallel size.
    """

    world_size: PositiveInt
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("tp * cp * pp", self.tp * self.cp * self.pp),
            ("etp * ep * pp", self.etp * self.ep * self.pp),
        ):
            rule = f"be a multiple of {name} ({size})"
            require(self.world_size % size == 0, "world_size", self.world_size, rule)

    @property
    def exchange_size(self) -> int:
        """Ranks of one exchange."""
        return self.ep * self.etp

    @property
    def dp(self) -> int:
        """Data parallel size of the attention."""
        return self.world_size // (self.tp * self.cp * self.pp)

    def incompatibility(self, model: Model) -> str | None:
        """Why this layout cannot train the model, or None if it can."""
        for field, size, name, whole in (
            ("ep", self.ep, "num-experts", model.num_experts),
            ("etp", self.etp, "moe-ffn-hidden-size", model.moe_ffn_hidden_size),
            ("tp", self.tp, "num-attention-heads", model.num_attention_heads),
        ):
            if whole % size != 0:
                return f"{field}: got {size}, must divide {name} of {model.name} ({whole})"
        if uneven_stages(model, self.pp) is None:
            return (
                f"pp: got {self.pp}, must leave some of the {model.num_layers} layers of "
                f"{model.name} to the last stage, or the model file must split them by "
                "pipeline-model-parallel-layout"
            )
        # Sequence parallelism divides the sequence; context parallelism gives each rank two pieces.
        parts = self.tp * self.cp * (2 if self.cp > 1 else 1)
        if model.seq_length % parts != 0:
            return (
                f"tp: got {self.tp}, must divide seq-length of {model.name} ({model.seq_length}) "
                f"together with cp ({self.cp})"
            )
        return None

    def tokens_per_rank(self, model: Model) -> int:
        """Tokens that one rank brings to an exchange."""
        return model.seq_length * model.micro_batch_size // (self.tp * self.cp)

    def num_micro_batches(self, model: Model, global_batch_size: int) -> int:
        """Micro-batches of an iteration.

        Raises:
            UserError: they do not share its sequences evenly.
        """
        size = model.micro_batch_size * self.dp
        rule = f"be a multiple of {size}, the sequences of a micro-batch on all data parallel ranks"
        require(global_batch_size % size == 0, "--global-batch-size", global_batch_size, rule)
        return global_batch_size // size


def exchange_of(layout: ParallelLayout, num_experts: int, ranks_per_node: int) -> Layout:
    """The exchange of a layout that lies on the most nodes, as its first rank sees it.

    Megatron numbers the expert ranks of a pipeline stage with ETP fastest, then EP, so an exchange
    is a run of consecutive ranks. If its size fits the nodes, all of them lie in the same way;
    otherwise the others wait for this one.
    """
    size = layout.exchange_size
    # After so many ranks the pattern repeats.
    period = min(math.lcm(size, ranks_per_node), layout.world_size)
    patterns = (
        tuple((first + rank) // ranks_per_node - first // ranks_per_node for rank in range(size))
        for first in range(0, period, size)
    )
    return Layout(
        ep=layout.ep,
        etp=layout.etp,
        num_local_experts=num_experts // layout.ep,
        rank=0,
        nodes=max(patterns, key=lambda nodes: nodes[-1]),
    )


# Needed for every chain and number of chunks.
@lru_cache(maxsize=64)
def priced_ranks(layout: Layout, routing: Routing) -> tuple[tuple[Layout, int], ...]:
    """The ranks of an exchange that are priced, and how many ranks each stands for.

    Args:
        layout: layout of the exchange, as any of its ranks sees it.
        routing: distribution of tokens over experts.
    """
    # Chains copy tokens for ranks, and for nodes if these are even.
    in_order, ranks = layout.uneven_nodes() is None, range(len(layout.nodes))
    parts = {layout.ep, layout.num_nodes} if in_order else {layout.ep}
    kinds: list[Hashable] = list(ranks)
    if all(routing.is_even(num_parts) for num_parts in parts):
        kinds = [in_order or _peers_on_node(layout, rank) for rank in ranks]
    numbers = Counter(kinds).items()
    return tuple((replace(layout, rank=kinds.index(kind)), number) for kind, number in numbers)


def _peers_on_node(layout: Layout, rank: int) -> tuple[int, ...]:
    """Ranks of each group on the node of a rank."""
    node = layout.nodes[rank]
    groups = (layout.members(name, rank) for name in FLAT_GROUPS)
    return tuple(sum(layout.nodes[peer] == node for peer in peers) for peers in groups)


def shape_of_layout(
    model: Model, layout: ParallelLayout, ranks_per_node: int, tokens_per_rank: int | None = None
) -> Shape:
    """The exchange of a layout, with the model's own router.

    Without `tokens_per_rank`, the number of tokens follows from the model's batch.
    """
    tokens = layout.tokens_per_rank(model) if tokens_per_rank is None else tokens_per_rank
    require(tokens <= MOST_TOKENS, "tokens", tokens, f"be at most {MOST_TOKENS:,} on a rank")
    return Shape(
        layout=exchange_of(layout, model.num_experts, ranks_per_node),
        hidden_size=model.row_size,
        value_bytes=model.value_bytes,
        prob_bytes=model.prob_bytes,
        routing=uniform_routing(model),
        tokens_per_rank=tokens,
    )


def training_of_layout(model: Model, layout: ParallelLayout, auto: bool = True) -> Training:
    """What the training of a model does to its exchange, by the model's arguments.

    Args:
        model: the trained model.
        layout: sizes of the groups of its ranks.
        auto: whether "auto" chooses the chain, as in `training_of`.
    """
    sizes = {argument: getattr(layout, name) for name, argument in PARALLEL_ARGUMENTS.items()}
    settings = settings_of({**model.arguments, **sizes, "num-layers": model.num_layers})
    return training_of(settings, auto)


# Arguments that split a model's layers into pipeline stages in a language of their own.
UNREAD_SPLITS = ("pipeline-model-parallel-layout", *HYBRID_PATTERNS)
# Arguments for the number of layers of the first and of the last stage, and flags by which each of
# them counts one layer more.
END_STAGES = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def stages_of(model: Model, pp: int) -> list[slice]:
    """Layers of each pipeline stage: consecutive, equally many in all but a shorter last one.

    Arguments of Megatron for the first and the last stage are followed; virtual stages are not.

    Hand-worked: 61 layers on 4 stages are 16, 16, 16 and 13; with
    --decoder-first-pipeline-num-layers 13 they are 13 and three times 16.
    """
    read = Reader(model.arguments, model.name)
    before, after = map(read.flag, COUNTED)
    first, last = map(read.optional, END_STAGES) if pp > 1 else (None, None)
    num_even = pp - (first is not None) - (last is not None)
    rest = model.num_layers + before + after - (first or 0) - (last or 0)
    size = math.ceil(rest / max(num_even, 1))
    sizes = [first or size, *[size] * (pp - 2), last or size][:pp]
    # The embedding is layer -1, the loss the one after the last.
    stages = pairwise(accumulate(sizes, initial=-int(before)))
    return [slice(max(start, 0), end) for start, end in stages if start < model.num_layers]


def max_moe_layers(model: Model, pp: int) -> int:
    """MoE layers of the pipeline stage with the most of them."""
    return max(sum(model.moe_layers[stage]) for stage in stages_of(model, pp))


def uneven_stages(model: Model, pp: int) -> dict[str, int] | None:
    """Megatron's argument for a shorter last stage where stages cannot be even.

    Hand-worked: 61 layers on 8 stages are 7 x 8 and a last of 5.

    Returns:
        Nothing where stages are even, or the model's arguments split its layers; None where no
        layers would be left for the last stage.
    """
    read = Reader(model.arguments, model.name)
    if model.num_layers % pp == 0 or any(map(read.value, UNREAD_SPLITS + END_STAGES + COUNTED)):
        return {}
    stages = stages_of(model, pp)
    last = model.num_layers - stages[-1].start
    return {"decoder-last-pipeline-num-layers": last} if len(stages) == pp else None


def uniform_routing(model: Model) -> UniformRouting:
    """The model's router with every expert as likely as any other."""
    return UniformRouting(
        num_experts=model.num_experts,
        topk=model.moe_router_topk,
        num_groups=model.moe_router_num_groups or 1,
        group_topk=model.moe_router_group_topk or 1,
    )
