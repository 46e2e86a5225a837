"""The model: the dimensions of an MoE layer that decide its exchange and its memory.

Fields are named as Megatron-Core names them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from monta_megatron.common.flags import DTYPE_BYTES, Dtype
from monta_megatron.common.rules import ArgumentValue, PositiveFloat, PositiveInt, Text, require
from monta_megatron.common.text import one_of

# Sizes of a training; every command that takes a model has flags for them.
BATCH = ("seq_length", "micro_batch_size")
# The planner keeps a share for each.
MOST_EXPERTS = 65_536
# No model has so many parameters besides its experts: the number was not written in billions.
MOST_TIMES_EXPERTS = 1_000


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model, and the batch that it is trained with.

    Attributes:
        name: what users call it.
        source: where the dimensions were published.
        hidden_size: values of a token's hidden row, H.
        num_layers: transformer layers.
        num_moe_layers: transformer layers with experts.
        num_attention_heads: query heads; a tensor parallel size must divide them.
        num_query_groups: key and value heads.
        num_experts: routed experts per layer.
        moe_router_topk: experts per token.
        moe_ffn_hidden_size: FFN size of one expert; an expert tensor parallel size must divide it.
        num_parameters_billions: parameters of the whole model, embeddings included.
        seq_length: tokens per sequence; chosen for the training, not given by the model.
        micro_batch_size: sequences per micro-batch, also chosen for the training.
        dtype: dtype of the hidden rows in transit.
        probs_dtype: dtype of the routing probabilities (Megatron: moe_router_dtype).
        moe_router_num_groups: number of expert groups of a group-limited router.
        moe_router_group_topk: groups that a token may use.
        megatron: further arguments of Megatron that the model needs, by their names without --;
            plans do not read them.
        not_expressed: parts of the model that Megatron's arguments do not say.
        taken: how a config.json was read where that leaves something open; a plan notes it.
        assumed: fields that nobody has given; a plan notes what was taken for them.
    """

    name: Text
    source: Text
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_moe_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    num_experts: PositiveInt
    moe_router_topk: PositiveInt
    moe_ffn_hidden_size: PositiveInt
    num_parameters_billions: PositiveFloat
    seq_length: PositiveInt
    micro_batch_size: PositiveInt
    dtype: Dtype = "bf16"
    probs_dtype: Dtype = "fp32"
    moe_router_num_groups: PositiveInt | None = None
    moe_router_group_topk: PositiveInt | None = None
    megatron: Mapping[str, ArgumentValue] = field(default_factory=dict, hash=False)
    not_expressed: tuple[Text, ...] = ()
    taken: tuple[Text, ...] = ()
    assumed: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        experts, topk = self.num_experts, self.moe_router_topk
        require(experts <= MOST_EXPERTS, "num_experts", experts, f"be at most {MOST_EXPERTS}")
        require(topk <= experts, "moe_router_topk", topk, f"be at most num_experts ({experts})")
        require(
            self.num_moe_layers <= self.num_layers,
            "num_moe_layers",
            self.num_moe_layers,
            f"be at most num_layers ({self.num_layers})",
        )
        heads, query_groups = self.num_attention_heads, self.num_query_groups
        rule = f"divide num_attention_heads ({heads})"
        require(heads % query_groups == 0, "num_query_groups", query_groups, rule)
        self._check_num_parameters()
        for name in self.assumed:
            names = [entry.name for entry in fields(self)]
            require(name in names, "assumed", name, f"be {one_of(name, names)}")
        groups, group_topk = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None and group_topk is None:
            return
        if groups is None or group_topk is None:
            raise ValueError(
                "moe_router_group_topk: must be given together with moe_router_num_groups, or "
                "neither"
            )
        rule = f"divide num_experts ({experts})"
        require(experts % groups == 0, "moe_router_num_groups", groups, rule)
        for holds, rule in (
            (group_topk <= groups, f"be at most moe_router_num_groups ({groups})"),
            (
                group_topk * (experts // groups) >= topk,
                f"leave at least moe_router_topk ({topk}) experts to choose from",
            ),
        ):
            require(holds, "moe_router_group_topk", group_topk, rule)

    def _check_num_parameters(self) -> None:
        total = self.num_parameters_billions
        # Experts without a gate have two matrices.
        least = self.num_expert_parameters * 2 / 3 / 1e9
        for holds, rule in (
            (
                total >= least,
                f"be at least {least:.4g}, the experts alone (num_moe_layers x num_experts x 2 x "
                "hidden_size x moe_ffn_hidden_size)",
            ),
            (
                total <= MOST_TIMES_EXPERTS * least,
                f"be in billions, of which the experts have {least:.4g} or more; write "
                f"{total / 1e9:.4g} if {total:g} is the number itself",
            ),
        ):
            require(holds, "num_parameters_billions", f"{total:g}", rule)

    @property
    def value_bytes(self) -> int:
        """Bytes of one hidden value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def prob_bytes(self) -> int:
        """Bytes of one routing probability."""
        return DTYPE_BYTES[self.probs_dtype]

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all routed experts: two matrices in (gate and up) and one out."""
        per_expert = 3 * self.hidden_size * self.moe_ffn_hidden_size
        return self.num_moe_layers * self.num_experts * per_expert

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a plan about the model."""
        if not self.assumed:
            return self.taken
        values = ", ".join(f"{name} {getattr(self, name)}" for name in self.assumed)
        flags = [f"--{name.replace('_', '-')}" for name in self.assumed if name in BATCH]
        advice = f"; {', '.join(flags)} for others" if flags else ""
        training = f"how {self.name} is trained is not in its file, assumed: {values}{advice}"
        return (*self.taken, training)


def with_batch(
    model: Model, seq_length: int | None = None, micro_batch_size: int | None = None
) -> Model:
    """A model with the batch of a training; None leaves the one that it has."""
    given = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
    changes: dict[str, Any] = {name: size for name, size in given.items() if size is not None}
    assumed = tuple(name for name in model.assumed if name not in changes)
    return replace(model, **changes, assumed=assumed)
