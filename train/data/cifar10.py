"""CIFAR-10: 50,000 training and 10,000 test images, 32 × 32 RGB, of ten kinds of things.

Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np

from train.data.download import check_sha256
from train.data.shard_set import ShardSet, Split, cache_folder, find_shards, write_shards
from train.errors import TrainError

ARCHIVE = "cifar-10-python.tar.gz"
ADDRESS = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
CHECKSUM = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"

BY_HAND = f"Download {ADDRESS} and name the file with --data"

MEMBERS = {
    "train": [f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)],
    "test": ["cifar-10-batches-py/test_batch"],
}


def prepare(data: Path | None, checksums: Collection[str] = (CHECKSUM,)) -> ShardSet:
    """Shards of CIFAR-10.

    Args:
        data: a folder with shards, the archive of python batches as published, or a folder with
            this archive. The archive's shards are written to the cache on first use.
        checksums: SHA-256 of the archives to accept.

    Raises:
        TrainError: if there is no data, it is not what it should be, or the shards cannot be
            written.
    """
    if data is None:
        raise TrainError(
            f"cifar10 needs --data: a folder with shards train-*.tar and test-*.tar, or the "
            f"archive of python batches. {BY_HAND}"
        )
    if shards := find_shards(data):
        return shards
    archive = data / ARCHIVE if data.is_dir() else data
    if not archive.exists():
        raise TrainError(
            f"--data {data} is neither a folder with shards train-*.tar and test-*.tar or with "
            f"{ARCHIVE}, nor such a file. {BY_HAND}"
        )
    check_sha256(archive, checksums, BY_HAND)
    cached = cache_folder("cifar10")
    return find_shards(cached) or write_shards(cached, load(archive))


def load(archive: Path) -> dict[str, Split]:
    """The two splits from the archive of python batches.

    Raises:
        TrainError: if the archive is not one of CIFAR-10.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            batches = {
                split: [_read_batch(tar.extractfile(member)) for member in members]
                for split, members in MEMBERS.items()
            }
    except (tarfile.TarError, EOFError, OSError, pickle.UnpicklingError, KeyError) as error:
        raise TrainError(f"{archive} is no archive of CIFAR-10: {error}. {BY_HAND}") from error
    return {
        split: (np.concatenate([b[0] for b in parts]), np.concatenate([b[1] for b in parts]))
        for split, parts in batches.items()
    }


def _read_batch(file: IO[bytes] | None) -> Split:
    if file is None:
        raise KeyError("a batch is not a regular file")
    batch = _ArraysOnly(file, encoding="bytes").load()
    # The pixels of an image are its red plane, then green, then blue.
    return batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(batch[b"labels"])


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ARRAY_PARTS = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
}


class _ArraysOnly(pickle.Unpickler):
    """Makes containers, numbers, strings and NumPy arrays, and runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse what an array does not need."""
        try:
            return _ARRAY_PARTS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it would run {module}.{name}") from None
