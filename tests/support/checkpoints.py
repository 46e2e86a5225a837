"""The content of a distributed checkpoint of Megatron."""

from io import BytesIO
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader

from monta_megatron.tools.placed_checkpoint import iteration_folder


def stored(checkpoint: Path) -> dict[str, bytes]:
    """Piece of the latest iteration -> the bytes of its tensor, or of its object."""
    folder = iteration_folder(checkpoint)
    content = {}
    for key, info in FileSystemReader(folder).read_metadata().storage_data.items():
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            piece = file.read(info.length)
        if key.offset is not None:
            tensor = torch.load(BytesIO(piece))
            piece = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        content[f"{key.fqn} {key.offset}"] = piece
    return content
