"""Text to a Megatron dataset: one document per text, one token per byte.

UTF-8 never contains the byte 255, so it ends each document, and 256 ids are the whole vocabulary:
what Megatron's NullTokenizer assumes with `--vocab-size 256`. No tokenizer has to be downloaded.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

VOCAB_SIZE = 256
END_OF_DOCUMENT = 255


def python_documentation() -> list[bytes]:
    """The English prose that ships with Python."""
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def prepare(texts: Sequence[bytes], folder: Path) -> Path:
    """Write `texts` as an indexed dataset under `folder`, unless one is there already.

    Returns:
        The prefix that `--data-path` takes.
    """
    prefix = folder / "text"
    # The index is written last, so that it marks a dataset that is complete.
    index = prefix.with_suffix(".idx")
    if index.exists():
        return prefix

    # Megatron takes seconds to import, and a later start does not need it. It warns about every
    # optional library that is missing, none of which a dataset needs.
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype=np.uint16)
    for text in texts:
        tokens = np.frombuffer(text + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
        builder.add_document(tokens, [tokens.size])
    partial_index = prefix.with_suffix(".idx.partial")
    builder.finalize(str(partial_index))
    partial_index.rename(index)
    return prefix
