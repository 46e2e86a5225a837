"""Where a tensor first differs from the one that it has to be equal to."""

import torch


def first_difference(name: str, ours: torch.Tensor, theirs: torch.Tensor, whose: str) -> str:
    """The first place, and both values there; "" if all are equal.

    Args:
        name: what the tensors are.
        ours, theirs: of one shape.
        whose: what the other value is said with, such as "stock's is".
    """
    places = (ours != theirs).nonzero()
    if len(places) == 0:
        return ""
    first = tuple(places[0].tolist())
    return (
        f"{name} differs at {list(first)}: {ours[first].item():g}, {whose} {theirs[first].item():g}"
    )
