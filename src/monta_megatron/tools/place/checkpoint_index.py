"""The index of a checkpoint of Megatron's format torch_dist, after a placement.

Such a checkpoint is PyTorch's distributed one. Its index says to which offset of a tensor each
piece belongs, and where in a file the piece is. Every expert is a piece of its own: experts move in
the index, and nothing of theirs is read. Router rows and expert bias are one piece for all experts,
which is written anew. What an optimizer keeps for a parameter has its shape and its name, after
"optimizer.state.exp_avg." or the like, and moves with it; flat shards of the distributed optimizer
do not say what is in them.

    decoder.layers.mlp.experts.experts.linear_fc1.weight      [L, E, ...], pieces of [1, 1, ...]
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight    [E, ...], where layers differ
    decoder.layers.mlp.router.weight                          [L, E, H], pieces of [1, E, H]

Notation: L = layers, E = experts, H = hidden size.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from monta_megatron.tools.place.placement_file import Placement

_ROUTER = {"weight", "bias", "expert_bias", "qb_beta"}
_EXPERTS = re.compile(r"experts\.linear_fc[12]\.(weight|bias|_extra_state\d*)")
# A parameter of experts, with what stands before it. An object has a piece, and a name, for every
# expert: its offsets and the shape of all.
_NAME = re.compile(
    r"(?:.*\.)?decoder\.layers\.(?:(?P<layer>\d+)\.)?mlp\.(?P<part>router|experts)\."
    r"(?P<name>[^/]*)(?:/shard_(?P<offsets>[\d.]+)_[\d.]+)?"
)
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A piece of a parameter of experts.

    Attributes:
        layer: layer of the decoder, counted from 0.
        axis: that of the experts.
        offsets: where it belongs.
        is_router: whether it holds all experts.
    """

    layer: int
    axis: int
    offsets: list[int]
    is_router: bool


def piece_of(name: str, offset: Any) -> _Piece | None:
    """What a piece is, by its name in the index; None if it has nothing to do with experts.

    Raises:
        ValueError: it has, but nobody knows what.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    is_router = match["part"] == "router"
    if not (match["name"] in _ROUTER if is_router else _EXPERTS.fullmatch(match["name"])):
        raise ValueError(f"{name}: is nothing that is known of experts")
    offsets = [int(number) for number in offset or (match["offsets"] or "0.0").split(".")]
    return _Piece(
        layer=offsets[0] if match["layer"] is None else int(match["layer"]),
        axis=1 if match["layer"] is None else 0,
        offsets=offsets,
        is_router=is_router,
    )


def check_index(index: Any, placement: Placement, without_optimizer: bool) -> None:
    """Check that a placement fits a checkpoint, and that all that it moves can be moved.

    Args:
        index: PyTorch's `Metadata`.
        placement: orders of experts.
        without_optimizer: whether flat shards are left out.

    Raises:
        ValueError: one line that names what does not fit.
    """
    layers = set()
    for name, tensor in index.state_dict_metadata.items():
        if _FLAT.match(name) and not without_optimizer:
            raise ValueError(
                f"{name}: the distributed optimizer's flat shards cannot be placed; save with "
                "--dist-ckpt-optim-fully-reshardable, or leave the optimizer's state out with "
                "--without-optimizer and train on with --no-load-optim"
            )
        for chunk in getattr(tensor, "chunks", ()):
            piece = piece_of(name, chunk.offsets)
            if piece is None:
                continue
            num_experts = tensor.size[piece.axis] if len(tensor.size) > piece.axis else 0
            if num_experts != placement.num_experts:
                raise ValueError(
                    f"{name}: got {num_experts} experts, must be the {placement.num_experts} of "
                    f"the placement, which is of {placement.model}"
                )
            sizes = [1] * piece.axis + [num_experts if piece.is_router else 1]
            if list(chunk.sizes[: piece.axis + 1]) != sizes:
                raise ValueError(
                    f"{name}: got a piece of {list(chunk.sizes)} in {list(tensor.size)}, must be "
                    f"of {'all experts' if piece.is_router else 'one expert'} of a layer"
                )
            layers.add(piece.layer)
    missing = sorted(placement.layers.keys() - layers)
    if missing:
        raise ValueError(
            f"got experts in layers {sorted(layers)}, must be in layer {missing[0]}, too, which "
            f"the placement of {placement.model} moves"
        )


def place_index(index: Any, placement: Placement) -> tuple[Any, dict[Any, list[int]]]:
    """The index of the placed checkpoint, and which pieces have to be written anew.

    Args:
        index: PyTorch's `Metadata`, checked.
        placement: orders of experts.

    Returns:
        The index without flat shards of an optimizer; piece of a router -> order of its experts.
    """
    positions = placement.inverse().layers
    storage, orders = {}, {}
    for key, info in index.storage_data.items():
        if _FLAT.match(key.fqn):
            continue
        piece = piece_of(key.fqn, key.offset)
        if piece is not None and piece.layer in positions:
            if piece.is_router:
                orders[key] = placement.layers[piece.layer]
            else:
                offsets = list(piece.offsets)
                offsets[piece.axis] = positions[piece.layer][offsets[piece.axis]]
                key = _moved(key, offsets)
        storage[key] = info
    # All experts of a layer are divided alike: the same pieces as before, found elsewhere.
    names = {
        name: tensor for name, tensor in index.state_dict_metadata.items() if not _FLAT.match(name)
    }
    assert storage.keys() == {key for key in index.storage_data if key.fqn in names}
    return replace(index, state_dict_metadata=names, storage_data=storage), orders


def _moved(key: Any, offsets: list[int]) -> Any:
    """A piece of the index, elsewhere: a tensor's has an offset, an object's name says it."""
    if key.offset is not None:
        return replace(key, offset=torch.Size(offsets))
    name, _, shape = key.fqn.rpartition("_")
    start = name[: name.rindex("/shard_")]
    return replace(key, fqn=f"{start}/shard_{'.'.join(map(str, offsets))}_{shape}")
