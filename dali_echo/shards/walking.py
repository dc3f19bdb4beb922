"""The samples of a tar shard, and where in the file their components lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dali_echo.shards.tar import Damage, DamagedTarError, Member, members

REMEDIES: dict[Damage, str] = {
    "not a tar": "Fetch or write the shard again; decompress it if it is compressed",
    "truncated": "Fetch or write the shard again",
    "bad header": "Fetch or write the shard again",
    "concatenated": "Join tars with `tar --concatenate`, or keep them apart",
    "trailing data": "Write the shard again",
    "sparse": "Write the shard again without tar's --sparse: a sparse file cannot be read in place",
}


class Component(NamedTuple):
    """One file of a sample: its name in the tar, extension, and its bytes' offset and size."""

    name: str
    extension: str
    offset: int
    size: int


@dataclass(slots=True)
class Sample:
    """The components that share a key, by lower-case extension, in the order of the tar."""

    key: str
    components: dict[str, Component]


def samples(path: Path | str, file: BinaryIO) -> list[Sample]:
    """Group the members of the tar `file` into samples, in order of first appearance.

    Raises:
        ValueError: `file` is not a tar, is compressed, damaged or truncated, holds a sparse file,
            or holds no sample. The message names `path`.
    """
    found: list[Sample] = []
    skipped = 0
    try:
        skipped = group(members(file), found)
    except DamagedTarError as error:
        raise ValueError(
            f"{path}: not a complete, uncompressed tar archive ({error}). {REMEDIES[error.kind]}"
        ) from error
    if not found:
        raise ValueError(
            f"{path}: the shard holds no sample: none of its {skipped} member(s) is a regular file "
            "named KEY.EXTENSION. Remove it from the list of shards"
        )
    return found


def group(found: Iterable[Member], into: list[Sample]) -> int:
    """Append the samples that members make up to `into`, and count the members that are no component.

    WebDataset's rules hold: the key is the name up to the first dot of its last part, the rest is
    the extension, in any case; what is not a regular file, starts with a dot or has no extension
    is skipped. Unlike there, components of a sample need not be neighbours. A component that its
    sample already has begins a new sample.
    """
    latest: dict[str, Sample] = {}
    skipped = 0
    for name, offset, size, is_file in found:
        stem, _, extension = name[name.rfind("/") + 1 :].partition(".")
        if not (is_file and stem and extension):
            skipped += 1
            continue
        key, slot = name[: -len(extension) - 1], extension.lower()
        sample = latest.get(key)
        if sample is None or slot in sample.components:
            sample = latest[key] = Sample(key, {})
            into.append(sample)
        sample.components[slot] = Component(name, extension, offset, size)
    return skipped
