"""A checkpoint with placed experts: written beside the other one, then renamed.

Such a checkpoint is PyTorch's distributed one (Megatron's format torch_dist). Its index says to
which offset of a tensor each piece belongs, and where in a file the piece is. Every expert is a
piece of its own: experts move in the index, and nothing of theirs is read. Router rows and expert
bias are one piece for all experts, which is written anew. An optimizer's state of a parameter has
its shape and its name, after "optimizer.state.exp_avg." or the like, and moves with it; flat shards
of the distributed optimizer do not name their parameters.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from monta_megatron.tools.place.placement import Placement

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
    """Kind of a piece by its name in the index; None if it has nothing to do with experts.

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


TRACKER, INDEX = "latest_checkpointed_iteration.txt", ".metadata"


@dataclass(frozen=True, kw_only=True)
class PlacedCheckpoint:
    """Result of `monta place --apply`.

    Attributes:
        folder: of the iteration that was written.
        layers: whose experts were placed.
    """

    folder: Path
    layers: list[int]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"written": str(self.folder), "layers": self.layers}

    def text(self) -> str:
        """The same in words."""
        return f"wrote {self.folder}: the experts of {len(self.layers)} layers"


def apply_placement(
    checkpoint: Path, placement: Placement, out: Path | None, without_optimizer: bool = False
) -> PlacedCheckpoint:
    """Write a checkpoint whose experts are placed, whole or not at all.

    Args:
        checkpoint: what Megatron's --load takes, or the folder of an iteration in it.
        placement: order of the experts of each layer.
        out: folder that --load will take, not there yet; None to replace the iteration's folder.
        without_optimizer: leave out an optimizer's state in flat shards.

    Raises:
        ValueError: one line; nothing was written.
    """
    source = iteration_folder(checkpoint)
    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        raise ValueError(f"--out: got {out}, must not exist, in a folder that does")
    parent = source.parent if out is None else out.absolute().parent
    unfinished = parent / f".{os.urandom(8).hex()}.tmp"
    folder = unfinished if out is None else unfinished / source.name
    try:
        folder.mkdir(parents=True)
        # Later writes into the files of one checkpoint must not reach the other.
        _fill(folder, source, placement, without_optimizer, os.link if out is None else _copy)
        if out is None:
            _replace_folder(source, unfinished)
            return PlacedCheckpoint(folder=source, layers=sorted(placement.layers))
        iteration = source.name.removeprefix("iter_")
        tracked = str(int(iteration)) if iteration.isdecimal() else source.name
        (unfinished / TRACKER).write_text(tracked)
        unfinished.rename(out)
        return PlacedCheckpoint(folder=out / source.name, layers=sorted(placement.layers))
    except OSError as error:
        raise ValueError(f"{out or source}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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


def _fill(
    folder: Path,
    source: Path,
    placement: Placement,
    without_optimizer: bool,
    take: Callable[[Path, Path], object],
) -> None:
    """Write the placed checkpoint of an iteration into an empty folder."""
    try:
        index = FileSystemReader(source).read_metadata()
    except Exception as error:
        raise ValueError(f"{source / INDEX}: cannot be read: {type(error).__name__}") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{source / INDEX}: must be the index of a torch_dist checkpoint")
    try:
        check_index(index, placement, without_optimizer)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    placed, orders = place_index(index, placement)
    names = {info.relative_path for info in index.storage_data.values()}
    new_file = next(
        name for n in range(len(names) + 1) if (name := f"__placed_{n}.distcp") not in names
    )
    with (folder / new_file).open("wb") as file:
        for key, order in orders.items():
            start = file.tell()
            info = placed.storage_data[key]
            torch.save(_permuted(source, key, info, order), file)
            placed.storage_data[key] = replace(
                info, relative_path=new_file, offset=start, length=file.tell() - start
            )
    needed = {info.relative_path for info in placed.storage_data.values()}
    for path in source.iterdir():
        is_needed = path.suffix != ".distcp" or path.name in needed
        if path.is_file() and path.name != INDEX and is_needed:
            take(path, folder / path.name)
    with (folder / INDEX).open("wb") as file:
        pickle.dump(placed, file)


def _permuted(source: Path, key: Any, info: Any, order: list[int]) -> torch.Tensor:
    """The rows of a piece of a router, in another order."""
    path = source / info.relative_path
    with path.open("rb") as file:
        file.seek(info.offset)
        piece = io.BytesIO(file.read(info.length))
    try:
        rows = torch.load(piece, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path}: {key.fqn}: cannot be read: {type(error).__name__}") from error
    found = piece_of(key.fqn, key.offset)
    assert found is not None, key.fqn
    return rows.index_select(found.axis, torch.tensor(order))


def _copy(path: Path, to: Path) -> None:
    shutil.copyfile(path, to)


def _replace_folder(folder: Path, by: Path) -> None:
    """Put a folder in another one's place; that one is kept until the other is there."""
    kept = folder.with_name(f".{folder.name}.replaced")
    folder.rename(kept)
    try:
        by.rename(folder)
    except OSError:
        kept.rename(folder)
        raise
    shutil.rmtree(kept)
