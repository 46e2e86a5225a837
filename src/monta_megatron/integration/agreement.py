"""What ranks make sure of together, before anything is exchanged."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from monta_megatron.chains.layout import check_named_alike, is_named
from monta_megatron.exchange.collectives import gather_objects

T = TypeVar("T")

SAME_OPTIONS = "give every rank the same options and files"
ADVICE = {"iteration": "an optimizer has to make a step on all ranks or on none"}


def agree(rule: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Make sure that all ranks of an exchange choose by the same rule.

    Raises:
        ValueError: names the first rank that differs, and the field.
    """
    check_same_rule(gather_objects(rule, group), dist.get_process_group_ranks(group))


def check_same_rule(rules: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Make sure that the rules of all ranks are the same.

    Raises:
        ValueError: names the first rank that differs, and the field.
    """
    for rank, other in zip(ranks[1:], rules[1:], strict=True):
        for name in dict.fromkeys((*rules[0], *other)):
            values = rules[0].get(name), other.get(name)
            if values[0] != values[1]:
                raise ValueError(
                    f"moe_monta: ranks {ranks[0]} and {rank} differ in {name}: {values[0]} and "
                    f"{values[1]}; {ADVICE.get(name, SAME_OPTIONS)}"
                )


def on_every_exchange(
    set_up: Callable[[], T], exchanges: dist.ProcessGroup | None, rule: dict[str, Any]
) -> T:
    """Set up this rank's exchange, if all exchanges of the pipeline stage can be set up.

    Otherwise one would end for its nodes, and the ranks of the others wait for it forever.

    Args:
        set_up: raises ValueError on all ranks of an exchange, or on none.
        exchanges: the ranks that have this rank's position in the stage's other exchanges; None if
            they are not known.
        rule: what all exchanges have to agree on.

    Raises:
        ValueError: `set_up` raised it, here or on another exchange; or the exchanges differ in
            their rules, or in whether MONTA_NODE is set.
    """
    problems, result = [], None
    try:
        result = set_up()
    except ValueError as error:
        problems = [str(error)]
    if exchanges is not None and dist.get_world_size(exchanges) > 1:
        ranks = dist.get_process_group_ranks(exchanges)
        answers = gather_objects((problems, is_named(), rule), exchanges)
        problems += [
            f"{problem} (on the exchange of rank {rank})"
            for rank, (elsewhere, _, _) in zip(ranks, answers, strict=True)
            for problem in elsewhere
        ]
        if not problems:
            check_named_alike([named for _, named, _ in answers], ranks)
            check_same_rule([rule for _, _, rule in answers], ranks)
    if problems:
        raise ValueError(problems[0])
    assert result is not None, "set up, or raised"
    return result
