"""A checkpoint with placed experts: written beside the other one, then renamed."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from monta_megatron.tools.place.checkpoint_index import check_index, piece_of, place_index
from monta_megatron.tools.place.placement_file import Placement

TRACKER, INDEX = "latest_checkpointed_iteration.txt", ".metadata"


def apply_placement(
    checkpoint: Path, placement: Placement, out: Path | None, without_optimizer: bool = False
) -> Path:
    """Write a checkpoint whose experts are placed, whole or not at all.

    Args:
        checkpoint: what Megatron's --load takes, or the folder of an iteration in it.
        placement: order of the experts of each layer.
        out: folder that --load will take, not there yet; None to replace the iteration's folder.
        without_optimizer: leave out an optimizer's state in flat shards.

    Returns:
        The folder of the iteration.

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
        # What a later training writes into the files of one checkpoint must not reach the other.
        _fill(folder, source, placement, without_optimizer, os.link if out is None else _copy)
        if out is None:
            _replace_folder(source, unfinished)
            return source
        iteration = source.name.removeprefix("iter_")
        tracked = str(int(iteration)) if iteration.isdecimal() else source.name
        (unfinished / TRACKER).write_text(tracked)
        unfinished.rename(out)
        return out / source.name
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
