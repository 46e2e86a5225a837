"""Text to a Megatron dataset: one document per text, one token per byte.

UTF-8 never contains the byte 255, so it ends each document, and 256 ids are the whole vocabulary:
what Megatron's NullTokenizer assumes with `--vocab-size 256`. No tokenizer has to be downloaded.
"""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path

VOCAB_SIZE = 256
END_OF_DOCUMENT = 255


def read_texts(files: Sequence[Path]) -> list[bytes]:
    """The documents to train on: `files`, or else the English prose that ships with Python.

    Raises:
        ValueError: a file cannot be read, is not UTF-8, or is empty.
    """
    if not files:
        from pydoc_data.topics import topics

        return [topics[name].encode() for name in sorted(topics)]
    texts = []
    for path in files:
        try:
            text = path.read_bytes()
            text.decode()
        except OSError as error:
            raise ValueError(f"--text: {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--text: {path}: must be UTF-8 text: {error}") from None
        if not text.strip():
            raise ValueError(f"--text: {path}: is empty, must hold text to train on")
        texts.append(text)
    return texts


def prepare(texts: Sequence[bytes], folder: Path) -> Path:
    """Write `texts` as an indexed dataset under `folder`, unless it is there already.

    Returns:
        The prefix that `--data-path` takes; its name is the hash of the texts.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text + bytes([END_OF_DOCUMENT]))
    prefix = folder / f"text-{digest.hexdigest()[:12]}"
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
