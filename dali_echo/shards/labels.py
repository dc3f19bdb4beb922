"""Labels written as text become int64 numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

# What WebDataset documents as decoded to an integer.
_EXTENSIONS = frozenset({"class", "cls", "cls2", "count", "id", "index", "inx"})
_LEAST, _GREATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
LONGEST = 4096  # bytes


def is_label(extension: str) -> bool:
    """Whether WebDataset decodes a component of this (lower-case) extension to an integer."""
    return extension.rpartition(".")[2] in _EXTENSIONS


def parse(text: bytes) -> int:
    """Give the integer that `text` spells, with the sign and white space that `int` accepts.

    Raises:
        ValueError: it spells none, or one that int64 does not hold, or is longer than `LONGEST`.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} bytes are too many for a label (at most {LONGEST})")
    number = int(text)
    if not _LEAST <= number <= _GREATEST:
        raise ValueError(f"{text!r} is beyond the range of int64")
    return number


def decode(text: DataNode) -> DataNode:
    """Turn a node of ASCII text, uint8 of shape (length,), into int64 numbers of shape ()."""
    return fn.python_function(text, function=_decode_batch, batch_processing=True)


def _decode_batch(batch: Sequence[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.int64]]:
    return [np.array(parse(text.tobytes()), np.int64) for text in batch]
