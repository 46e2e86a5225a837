"""Device-limited routing: the experts of a token lie on few nodes, or few ranks (Occult's pruning).

A token's best experts are walked by score until they name N places, nodes or ranks; its experts are
then the best ones that lie there. The places are those whose best expert scores highest. Megatron's
router asks a `router_replay` for its top-k, and goes on with what that answers: probabilities are
normalised over the new choice and expert bias is updated by it, while auxiliary losses come from
the free choice, all as in group-limited routing. This takes that place, and changes the model.

Notation: T = tokens, E = experts, k = experts per token, P = places, each with E / P experts in
order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from monta_megatron.chains.layout import Layout
from monta_megatron.common.rules import Unsupported

# Option -> what it counts.
PLACES = {"max_nodes_per_token": "nodes", "max_ranks_per_token": "ranks"}


def _type_is(name: str) -> Callable[[Any], bool]:
    def is_set(config: Any) -> bool:
        types = getattr(config, "moe_router_load_balancing_type", None)
        return name in (types if isinstance(types, list | tuple) else (types,))

    return is_set


# Besides `supported_settings.UNSUPPORTED`.
UNSUPPORTED_WITH_LIMITS = (
    Unsupported(
        "moe_router_fusion",
        lambda config: getattr(config, "moe_router_fusion", False),
        "the fused router chooses and normalises in one kernel; leave it out",
    ),
    Unsupported(
        "moe_enable_routing_replay",
        lambda config: getattr(config, "moe_enable_routing_replay", False),
        "a replay repeats the choices of another run, which are not limited",
    ),
    *(
        Unsupported(
            "moe_router_load_balancing_type",
            _type_is(name),
            f"{name} chooses experts by a balance over all of them, which a limit would undo",
        )
        for name in ("sinkhorn", "quantile_balancing")
    ),
)


class LimitedTopk:
    """Stands where a router keeps its replay, and answers with the top-k within few places.

    Attributes:
        limits: number of places -> how many of them a token may use, fewer places first.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = dict(sorted(limits.items()))
        # Megatron sets it on what a router keeps here.
        self.layer_number: int | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, E] scores, with the expert bias -> [T, k] scores and experts, as Megatron does."""
        for num_places, most in self.limits.items():
            scores = within_best_places(scores, num_places, most)
        # Megatron's own: whether it sorts depends on release and mode.
        return default_compute_topk(scores, topk, num_groups, group_topk)


def within_best_places(scores: torch.Tensor, num_places: int, most: int) -> torch.Tensor:
    """[T, E] -> [T, E] with -inf outside the `most` places whose best experts score highest."""
    # [T, E] -> [T, P, E / P]
    by_place = scores.unflatten(1, (num_places, -1))
    best = by_place.amax(dim=2).topk(most, dim=1, sorted=False).indices
    # [T, P]
    kept = torch.zeros(by_place.shape[:2], dtype=torch.bool, device=scores.device)
    kept.scatter_(1, best, True)
    return by_place.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a configuration, applied to an exchange.

    Attributes:
        limits: number of places -> how many of them a token may use.
        text: what users should know.
    """

    limits: Mapping[int, int]
    text: str


def limits_of(config: Any, layout: Layout) -> Limits:
    """The limits that a configuration asks for, of which there is one at least.

    Raises:
        ValueError: one does not fit the exchange, or the router's groups; it names the option.
    """
    limits: dict[int, int] = {}
    changed, unchanged = [], []
    groups, group_topk = config.moe_router_num_groups, config.moe_router_group_topk
    for name, places in PLACES.items():
        option, most = f"moe_monta_{name}", getattr(config, f"moe_monta_{name}", None)
        if most is None:
            continue
        num_places = _num_places(option, places, most, config.moe_router_topk, layout)
        text = f"{most} of {num_places} {places}"
        if most >= num_places:
            unchanged.append(f"{text}, which is all of them")
        elif groups is None:
            limits[num_places] = most
            changed.append(text)
        elif groups == num_places and group_topk <= most:
            unchanged.append(
                f"{text}, as --moe-router-num-groups {groups} --moe-router-group-topk {group_topk} "
                "already does"
            )
        else:
            raise ValueError(
                f"{option}: got {most}, must be left out beside moe_router_num_groups ({groups}), "
                f"whose choice it would undo; --moe-router-num-groups {num_places} "
                f"--moe-router-group-topk {most} limits the {places} by the groups themselves"
            )
    texts = [f"{text}: nothing changes" for text in unchanged]
    if changed:
        texts.append(
            f"{' and '.join(changed)}: this changes the model, as a token whose best experts lie "
            "on more goes to others"
        )
    return Limits(limits=limits, text=f"experts of a token limited to {'; to '.join(texts)}")


def groups_of(config: Any, layout: Layout) -> tuple[int, int]:
    """Limits as the planner takes them: groups of a router and how many of them a token may use."""
    own = (config.moe_router_num_groups or 1, config.moe_router_group_topk or 1)
    # The finest places say most.
    return max(limits_of(config, layout).limits.items(), default=own)


def limit_routing(router: Any, config: Any, layout: Layout, report: Callable[[str], Any]) -> None:
    """Let Megatron's TopKRouter choose within the limits, and say so."""
    limits = limits_of(config, layout)
    if limits.limits:
        router.router_replay = LimitedTopk(limits.limits)
    report(limits.text)


def _num_places(option: str, places: str, most: int, topk: int, layout: Layout) -> int:
    """Number of places, after a check that `most` of them are enough."""
    num_places = layout.num_nodes if places == "nodes" else layout.ep
    uneven = layout.uneven_nodes() if places == "nodes" else None
    if uneven is not None:
        raise ValueError(f"{option}: got {most}, must be left out here: {uneven}")
    experts = most * (layout.num_experts // num_places)
    if experts < topk:
        raise ValueError(
            f"{option}: got {most}, must leave the {topk} experts of moe_router_topk to choose "
            f"from; {most} of {num_places} {places} hold {experts}"
        )
    return num_places
