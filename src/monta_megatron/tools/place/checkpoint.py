"""`monta place --apply`: a checkpoint with its experts in another order.

The checkpoint is PyTorch's distributed one (Megatron's format torch_dist). Its index says to which
offset of a tensor each piece belongs, and where in a file the piece is. Every expert is a piece of
its own, so experts move in the index and no weight of theirs is read. Router rows and expert bias
are one piece for all experts, which is written anew. The optimizer's state of a parameter has the
parameter's shape and its name, after "optimizer.state.exp_avg." or the like, and moves with it. The
distributed optimizer's flat shards do not name their parameters: they are left out, which is said.

    decoder.layers.mlp.experts.experts.linear_fc1.weight      [L, E, ...], pieces of [1, 1, ...]
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight    [E, ...], where layers differ
    decoder.layers.mlp.router.weight                          [L, E, H], pieces of [1, E, H]

Notation: L = layers, E = experts, H = hidden size.
"""

import io
import os
import pickle
import re
import shutil
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader

from monta_megatron.tools.place.placement import Placement

TRACKER, INDEX = "latest_checkpointed_iteration.txt", ".metadata"
# The name of a parameter of experts, after that of an optimizer's state. An object is stored per
# expert: its name ends with its offsets and the shape of all.
_NAME = re.compile(
    r"(?:.*\.)?decoder\.layers\.(?:(?P<layer>\d+)\.)?mlp\.(?P<part>router|experts)\."
    r"(?P<name>[^/]*)(?:/shard_(?P<offsets>[\d.]+)_[\d.]+)?"
)
_PARAMETERS = {
    "router": re.compile(r"weight|bias|expert_bias|qb_beta"),
    "experts": re.compile(r"experts\.linear_fc[12]\.(weight|bias|_extra_state\d*)"),
}
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")


class _Piece(NamedTuple):
    """A piece of a parameter of experts.

    Attributes:
        layer: layer of the decoder, counted from 0.
        axis: axis of the experts.
        offsets: position in the whole tensor.
        is_router: whether it has rows of all experts, else it is one expert.
    """

    layer: int
    axis: int
    offsets: list[int]
    is_router: bool


def _piece_of(name: str, offset: Any) -> _Piece | None:
    """The piece by its name and offset in the index; None if it has nothing to do with experts.

    Raises:
        ValueError: it is a parameter of experts that is not known here.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if not _PARAMETERS[match["part"]].fullmatch(match["name"]):
        raise ValueError(f"{name}: must be one of Megatron's parameters of experts")
    offsets = [int(number) for number in offset or (match["offsets"] or "0.0").split(".")]
    together = match["layer"] is None
    return _Piece(
        layer=offsets[0] if together else int(match["layer"]),
        axis=1 if together else 0,
        offsets=offsets,
        is_router=match["part"] == "router",
    )


def _check_index(index: Any, placement: Placement) -> None:
    """Check that a placement fits a checkpoint.

    Raises:
        ValueError: another number of experts, pieces of several experts, or a layer is missing.
    """
    layers = set()
    for name, tensor in index.state_dict_metadata.items():
        for chunk in getattr(tensor, "chunks", ()):
            piece = _piece_of(name, chunk.offsets)
            if piece is None:
                continue
            num_experts = placement.num_experts
            rows = num_experts if piece.is_router else 1
            is_whole = list(chunk.sizes[: piece.axis + 1]) == [1] * piece.axis + [rows]
            if not is_whole or tensor.size[piece.axis] != num_experts:
                raise ValueError(
                    f"{name}: got a piece of {list(chunk.sizes)} in {list(tensor.size)}, must be "
                    f"of the {num_experts} experts of {placement.model}, whose placement this is"
                )
            layers.add(piece.layer)
    missing = sorted(placement.layers.keys() - layers)
    if missing:
        raise ValueError(
            f"got experts in layers {sorted(layers)}, must be in layer {missing[0]}, too, which "
            f"the placement of {placement.model} moves"
        )


def _place_index(index: Any, placement: Placement) -> tuple[Any, dict[Any, list[int]]]:
    """Index of the placed checkpoint, without flat shards; router piece -> order of its rows."""
    positions = placement.inverse().layers
    names = {
        name: tensor for name, tensor in index.state_dict_metadata.items() if not _FLAT.match(name)
    }
    storage, orders = {}, {}
    for key, info in index.storage_data.items():
        piece = None if _FLAT.match(key.fqn) else _piece_of(key.fqn, key.offset)
        if piece is not None and piece.layer in positions:
            if piece.is_router:
                orders[key] = placement.layers[piece.layer]
            else:
                piece.offsets[piece.axis] = positions[piece.layer][piece.offsets[piece.axis]]
                key = _moved(key, piece.offsets)
        if key.fqn in names:
            storage[key] = info
    # The experts of a layer are divided alike: the same pieces as before, found elsewhere.
    assert storage.keys() == {key for key in index.storage_data if key.fqn in names}
    return replace(index, state_dict_metadata=names, storage_data=storage), orders


def _moved(key: Any, offsets: list[int]) -> Any:
    """Key of a piece at other offsets; those of an object are in its name."""
    if key.offset is not None:
        return replace(key, offset=torch.Size(offsets))
    name, _, shape = key.fqn.rpartition("_")
    start = name[: name.rindex("/shard_")]
    return replace(key, fqn=f"{start}/shard_{'.'.join(map(str, offsets))}_{shape}")


@dataclass(frozen=True, kw_only=True)
class PlacedCheckpoint:
    """A checkpoint that was written.

    Attributes:
        folder: folder of its iteration.
        layers: layers whose experts were placed.
        without_optimizer: whether flat shards of an optimizer were left out.
    """

    folder: Path
    layers: list[int]
    without_optimizer: bool

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "written": str(self.folder),
            "layers": self.layers,
            "without_optimizer": self.without_optimizer,
        }

    def text(self) -> str:
        """The same in words."""
        lines = [f"wrote {self.folder}: the experts of {len(self.layers)} layers"]
        if self.without_optimizer:
            lines.append(
                "without the distributed optimizer's state, whose flat shards do not name their "
                "parameters: train on with --no-load-optim, or save with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        return "\n".join(lines)


def apply_placement(checkpoint: Path, placement: Placement, out: Path) -> PlacedCheckpoint:
    """Write a checkpoint whose experts are placed, whole or not at all.

    Args:
        checkpoint: value of Megatron's --load, or the folder of an iteration in it.
        placement: order of the experts of each layer.
        out: folder for --load, which must not exist.

    Raises:
        OSError: it cannot be written.
        ValueError: one line; nothing was written.
    """
    source = iteration_folder(checkpoint)
    if out.exists() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out: got {out}, must not exist, in a folder that does")
    unfinished = out.absolute().parent / f".{os.urandom(8).hex()}.tmp"
    try:
        (unfinished / source.name).mkdir(parents=True)
        without_optimizer = _fill(unfinished / source.name, source, placement)
        iteration = source.name.removeprefix("iter_")
        tracked = str(int(iteration)) if iteration.isdecimal() else source.name
        (unfinished / TRACKER).write_text(tracked)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return PlacedCheckpoint(
        folder=out / source.name,
        layers=sorted(placement.layers),
        without_optimizer=without_optimizer,
    )


def iteration_folder(checkpoint: Path) -> Path:
    """The folder with the index: the checkpoint itself, or that of its latest iteration.

    Raises:
        ValueError: there is none.
    """
    folder, tracker = checkpoint.absolute(), checkpoint / TRACKER
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        folder /= f"iter_{int(text):07d}" if text.isdecimal() else text
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{checkpoint}: must be a checkpoint that Megatron wrote with --ckpt-format "
            f"torch_dist; there is no {INDEX} in {folder}"
        )
    return folder


def _fill(folder: Path, source: Path, placement: Placement) -> bool:
    """Write the placed iteration into an empty folder; returns whether flat shards are left out."""
    try:
        index = FileSystemReader(source).read_metadata()
        _check_index(index, placement)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    except (pickle.UnpicklingError, AttributeError, EOFError) as error:
        raise ValueError(f"{source / INDEX}: must be the index of a checkpoint") from error
    placed, orders = _place_index(index, placement)
    # A checkpoint that was placed before has such a file, too.
    new_file = next(
        name for n in count() if not (source / (name := f"__placed_{n}.distcp")).exists()
    )
    with (folder / new_file).open("wb") as file:
        for key, order in orders.items():
            start, info = file.tell(), placed.storage_data[key]
            torch.save(_permuted(source, key, info, order), file)
            placed.storage_data[key] = replace(
                info, relative_path=new_file, offset=start, length=file.tell() - start
            )
    needed = {info.relative_path for info in placed.storage_data.values()}
    for path in source.iterdir():
        if path.is_file() and (path.name in needed or path.suffix != ".distcp"):
            shutil.copyfile(path, folder / path.name)
    with (folder / INDEX).open("wb") as file:
        pickle.dump(placed, file)
    return placed.state_dict_metadata.keys() != index.state_dict_metadata.keys()


def _permuted(source: Path, key: Any, info: Any, order: list[int]) -> torch.Tensor:
    """The rows of a piece of a router, in another order."""
    with (source / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        rows = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
    piece = _piece_of(key.fqn, key.offset)
    assert piece is not None, key.fqn
    return rows.index_select(piece.axis, torch.tensor(order))
