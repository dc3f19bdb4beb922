"""The samples of a tar shard, and where in the file their components lie."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

# Writers fill the last record of a tar with zeros: 10 kB by default, hardly ever more than this.
_TAIL = 1 << 20


class Component(NamedTuple):
    """One file of a sample: its name in the tar, extension, and its bytes' offset and size."""

    name: str
    extension: str
    offset: int
    size: int


@dataclass
class Sample:
    """The components that share a key, by lower-case extension, in the order of the tar."""

    key: str
    components: dict[str, Component] = field(default_factory=dict)


def samples(path: Path, file: BinaryIO) -> list[Sample]:
    """Group the members of the tar `file` into samples, in order of first appearance.

    WebDataset's rules hold: the key is the name up to the first dot of its last part, the rest is
    the extension, in any case; what is not a regular file, starts with a dot or has no extension
    is skipped. Unlike there, components of a sample need not be neighbours. A component that its
    sample already has begins a new sample.

    Raises:
        ValueError: `file` is not a tar, is compressed, damaged or truncated, holds a sparse file,
            or holds no sample. The message names `path`.
    """
    found: list[Sample] = []
    latest: dict[str, Sample] = {}
    skipped = 0
    for info in _members(path, file):
        folder, slash, base = info.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if not (info.isreg() and stem and extension):
            skipped += 1
            continue
        if info.issparse():
            raise ValueError(
                f"{path}: member {info.name!r} is stored as a sparse file, which cannot be read in "
                "place: write the shard again without tar's --sparse"
            )
        key, slot = folder + slash + stem, extension.lower()
        sample = latest.get(key)
        if sample is None or slot in sample.components:
            sample = latest[key] = Sample(key)
            found.append(sample)
        sample.components[slot] = Component(info.name, extension, info.offset_data, info.size)
    if not found:
        raise ValueError(
            f"{path}: the shard holds no sample: none of its {skipped} member(s) is a regular file "
            "named KEY.EXTENSION. Remove it from the list of shards"
        )
    return found


def _members(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (info := tar.next()) is not None:
                yield info
            end = tar.offset
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a complete, uncompressed tar archive ({error}). Fetch or write the shard "
            "again; decompress it if it is compressed"
        ) from error
    # tarfile takes a damaged header for the end, and stops at the first end mark of several tars
    # in one file: either way the samples behind it would be lost without a word.
    file.seek(end)
    if file.read(_TAIL).strip(b"\0"):
        raise ValueError(
            f"{path}: the archive ends at byte {end} but data follows: a damaged or cut-off member "
            "header, or several tars in one file. Write the shard again; join tars with "
            "`tar --concatenate`"
        )
