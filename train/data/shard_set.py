"""Shards of a training and a test split, which a folder holds complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import webdataset
from braceexpand import braceexpand
from rich.console import Console
from rich.progress import track

from train.errors import TrainError

Split = tuple[np.ndarray, np.ndarray]
"""Images, uint8 of shape (N, H, W) or (N, H, W, 3), and their labels, integers of shape (N,)."""

SAMPLES_PER_SHARD = 5000


@dataclass(frozen=True)
class ShardSet:
    """The shards of a data set: files, or URLs that `dali_echo.shards.read` takes."""

    train: Sequence[str | Path]
    test: Sequence[str | Path]


def cache_folder(name: str) -> Path:
    """The folder for data that can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dali_echo" / name


def find_shards(folder: Path) -> ShardSet | None:
    """The shards `train-*.tar` and `test-*.tar` of a folder; None unless it has both."""
    train, test = sorted(folder.glob("train-*.tar")), sorted(folder.glob("test-*.tar"))
    return ShardSet(train, test) if train and test else None


def remote_shards(pattern: str) -> ShardSet:
    """The shards that a URL with braces names, told apart by their names `train-…` and `test-…`.

    Raises:
        TrainError: if it does not name shards of both splits.
    """
    urls = list(braceexpand(pattern))
    train, test = (
        [url for url in urls if url.rpartition("/")[2].startswith(f"{split}-")] for split in ("train", "test")
    )
    if not train or not test:
        raise TrainError(
            f"--data {pattern} names {len(train)} shards train-* and {len(test)} shards test-*: write for "
            f"example http://HOST/{{train-{{0000..0009}},test-{{0000..0001}}}}.tar"
        )
    return ShardSet(train, test)


def write_shards(folder: Path, splits: Mapping[str, Split]) -> ShardSet:
    """Write PNG shards, named by their split, to a folder that is new or empty.

    They appear all at once, so that neither an interruption nor a second process at work on the
    same folder leaves a part of them.

    Raises:
        TrainError: if the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
            staged = Path(beside) / "shards"
            staged.mkdir()
            for name, (images, labels) in splits.items():
                _write_split(staged, name, images, labels)
            try:
                staged.rename(folder)
            except OSError:
                # Another process has been faster, with the same shards.
                if find_shards(folder) is None:
                    raise
    except OSError as error:
        raise TrainError(
            f"cannot write shards to {folder}: {error.strerror or error}. Name another folder with "
            f"--data, or another cache in the environment as XDG_CACHE_HOME"
        ) from error
    shards = find_shards(folder)
    if shards is None:
        raise TrainError(f"the shards in {folder} were removed while in use: start again")
    return shards


def _write_split(folder: Path, name: str, images: np.ndarray, labels: np.ndarray) -> None:
    pattern = f"{folder}/{name}-%04d.tar"
    samples = zip(images, labels, strict=True)
    console = Console(stderr=True)
    # A fixed time makes shards that are the same each time, and leaves out a header per member.
    with webdataset.ShardWriter(pattern, maxcount=SAMPLES_PER_SHARD, mtime=0, verbose=0) as writer:
        bar = track(
            samples,
            f"Writing {name} shards",
            total=len(images),
            transient=True,
            console=console,
            disable=not console.is_terminal,
        )
        for number, (image, label) in enumerate(bar):
            writer.write({"__key__": f"{number:06}", "png": image, "cls": int(label)})
