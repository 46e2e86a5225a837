"""`monta place --apply`: a checkpoint with its experts in another order.

The checkpoint is PyTorch's distributed one (Megatron's format torch_dist). Its index says to which
offset of a tensor each piece belongs, and where in a file the piece is. Every expert is a piece of
its own, so experts move in the index, and the files become hard links, or copies where the file
system has none. Router rows and expert bias are one piece for all experts, which is written anew,
to a file of its own. The optimizer's state of a parameter has the parameter's shape and its name,
after "optimizer.state.exp_avg." or the like, and moves with it. The distributed optimizer's flat
shards do not name their parameters: a checkpoint with them is refused.

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
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from monta_megatron.common import files
from monta_megatron.common.errors import UserError

# Layer -> [E] the expert at each position.
Placement = Mapping[int, list[int]]

TRACKER, INDEX = "latest_checkpointed_iteration.txt", ".metadata"
# A parameter of experts, after the name of an optimizer's state. An object is stored per expert:
# its name ends with its offsets and the shape of all.
_PARAMETER = re.compile(
    r"(?:.*\.)?decoder\.layers\.(?:(?P<layer>\d+)\.)?mlp\."
    r"(?:(?P<router>router\.(?:weight|bias|expert_bias|qb_beta))"
    r"|experts\.experts\.linear_fc[12]\."
    r"(?:weight|bias|_extra_state\d*/shard_(?P<offsets>[\d.]+)_[\d.]+))"
)
# Parameters of experts, whichever they are, and flat shards.
_REFUSED = re.compile(
    r"(?:.*\.)?decoder\.layers\.(?:\d+\.)?mlp\.(?:router|experts)\..*"
    r"|(?:chained_\d+\.)?optimizer\.distributed\..*"
)


def read_placement(path: Path, *, undo: bool = False) -> Placement:
    """Read a placement that `monta place --out` or `--json` wrote.

    Args:
        path: path of the placement file.
        undo: whether to return the inverse placement.

    Raises:
        UserError: it is no such file, or its placement was refused.
    """
    document = files.read_json(path)
    try:
        placement = {int(layer): list(order) for layer, order in document["placement"].items()}
        inverse = {
            layer: [order.index(expert) for expert in range(len(order))]
            for layer, order in placement.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: must be a file that `monta place --out` wrote") from error
    if document.get("refused"):
        raise UserError(f"{path}: is refused: {document['refused']}")
    return inverse if undo else placement


def apply_placement(checkpoint: Path, placement: Placement, out: Path) -> Path:
    """Write a checkpoint whose experts are placed, whole or not at all.

    Args:
        checkpoint: value of Megatron's --load, whose latest iteration is placed.
        placement: order of the experts of each layer.
        out: folder of the new checkpoint, for --load, which must not exist.

    Returns:
        The folder of the iteration inside `out`.

    Raises:
        OSError: the checkpoint cannot be read or written.
        UserError: one line; nothing was written.
    """
    # Step 1: the index.
    source = iteration_folder(checkpoint)
    if out.exists() or not out.absolute().parent.is_dir():
        raise UserError(f"--out: got {out}, must not exist, in a folder that does")
    try:
        index = FileSystemReader(source).read_metadata()
        pieces = _pieces_of(index, placement)
    except (pickle.UnpicklingError, AttributeError, EOFError, ValueError) as error:
        raise UserError(f"{source / INDEX}: cannot be placed: {error}") from error

    # Step 2: the files.
    with TemporaryDirectory(dir=out.absolute().parent, prefix=".monta_place_") as unfinished:
        folder = Path(unfinished, out.name, source.name)
        without_index = shutil.ignore_patterns(INDEX)
        shutil.copytree(source, folder, copy_function=_link_or_copy, ignore=without_index)
        shutil.copyfile(checkpoint / TRACKER, folder.parent / TRACKER)
        # A checkpoint that was placed before has such files already.
        paths = (folder / f"__placed_{number}.distcp" for number in count())
        with next(path for path in paths if not path.exists()).open("xb") as file:
            placed = {}
            for key, piece in pieces.items():
                info, order = index.storage_data[key], placement[piece.layer]
                if piece.is_router:
                    placed[key] = _write_rows(file, source, info, piece.axis, order)
                else:
                    placed[_moved(key, piece, order)] = info
        index.storage_data.update(placed)
        with (folder / INDEX).open("wb") as file:
            pickle.dump(index, file)
        folder.parent.rename(out)
    return out / source.name


def iteration_folder(checkpoint: Path) -> Path:
    """The folder of the latest iteration of a checkpoint.

    Raises:
        UserError: there is none.
    """
    if not (checkpoint / TRACKER).is_file():
        raise UserError(f"{checkpoint}: must be a folder for Megatron's --load, with {TRACKER}")
    iteration = (checkpoint / TRACKER).read_text().strip()
    return checkpoint / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)


class _Piece(NamedTuple):
    """A piece of a parameter of experts.

    Attributes:
        layer: layer of the decoder, counted from 0.
        axis: axis of the experts.
        offsets: position of the piece in the whole tensor.
        is_router: whether the piece has rows of all experts; otherwise it is one expert.
    """

    layer: int
    axis: int
    offsets: list[int]
    is_router: bool


def _pieces_of(index: Metadata, placement: Placement) -> dict[MetadataIndex, _Piece]:
    """All pieces that a placement moves.

    Raises:
        UserError: the placement does not fit the checkpoint.
    """
    pieces = {}
    experts: dict[int, set[int]] = {layer: set() for layer in placement}
    for key in index.storage_data:
        piece = _piece_of(key)
        if piece is not None and piece.layer in placement:
            pieces[key] = piece
            if not piece.is_router:
                experts[piece.layer].add(piece.offsets[piece.axis])
    for layer, order in placement.items():
        if sorted(experts[layer]) != sorted(order):
            raise UserError(
                f"layer {layer}: got {len(experts[layer])} experts that are stored one by one, "
                f"must be {len(order)}, as in the placement"
            )
    return pieces


def _piece_of(key: MetadataIndex) -> _Piece | None:
    """The piece at a key of the index; None if it has nothing to do with experts.

    Raises:
        UserError: it cannot be told which expert it belongs to.
    """
    match = _PARAMETER.fullmatch(key.fqn)
    if match is None:
        if _REFUSED.fullmatch(key.fqn):
            raise UserError(
                f"{key.fqn} is not stored by expert; save with --no-save-optim or "
                "--dist-ckpt-optim-fully-reshardable"
            )
        return None
    offsets = [int(offset) for offset in key.offset or match["offsets"].split(".")]
    axis = 1 if match["layer"] is None else 0
    layer = offsets[0] if axis else int(match["layer"])
    return _Piece(layer, axis, offsets, is_router=match["router"] is not None)


def _moved(key: MetadataIndex, piece: _Piece, order: list[int]) -> MetadataIndex:
    """Key of an expert at its new position; that of an object is in its name."""
    offsets = list(piece.offsets)
    offsets[piece.axis] = order.index(offsets[piece.axis])
    if key.offset is not None:
        return MetadataIndex(key.fqn, offsets)
    return MetadataIndex(re.sub(r"shard_[\d.]+", f"shard_{'.'.join(map(str, offsets))}", key.fqn))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def _write_rows(
    file: BinaryIO, source: Path, info: _StorageInfo, axis: int, order: list[int]
) -> _StorageInfo:
    """Write a router's piece in another order to a file; returns where it is."""
    with (source / info.relative_path).open("rb") as source_file:
        source_file.seek(info.offset)
        piece = io.BytesIO(source_file.read(info.length))
    rows = torch.load(piece, map_location="cpu", weights_only=True)
    start = file.tell()
    torch.save(rows.index_select(axis, torch.tensor(order)), file)
    length = file.tell() - start
    return replace(info, relative_path=Path(file.name).name, offset=start, length=length)
