"""What is wrong with shards, sample by sample."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dali_echo.shards import labels
from dali_echo.shards.decoding import Decoder, is_image
from dali_echo.shards.locating import local_paths
from dali_echo.shards.reading import alternatives
from dali_echo.shards.tar import DamagedTarError, Member, members
from dali_echo.shards.walking import REMEDIES, Component, Sample, group

Progress = Callable[[str, float], None]
_EVERY = 1000  # members: how often progress is told of


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a shard.

    Attributes:
        shard: the tar.
        key: the sample; None if it concerns the shard as a whole.
        problem: "unreadable", "not a tar", "truncated", "bad header", "concatenated", "trailing data",
            "sparse", "near-empty", "missing component", "duplicate component", "upper-case extension",
            "dotted extension", "label" or "image".
        detail: what exactly, and what to do about it.
    """

    shard: Path
    key: str | None
    problem: str
    detail: str


def verify(
    paths: str | Path | Iterable[str | Path],
    ext: Sequence[str] | None = None,
    *,
    decode: bool = False,
    progress: Progress = lambda what, fraction: None,
) -> list[Finding]:
    """Look for what would end a run, or give it wrong samples.

    A damaged tar is reported, and its samples up to the damage are looked at.

    Args:
        paths: local tars, as in `read`.
        ext: the components that every sample must have, as in `read`. By default those that the
            samples have most often.
        decode: whether to decode every image with DALI's CPU decoder.
        progress: called now and then with "Counting", and later "Verifying", and the fraction of all
            bytes that is behind, for a progress bar.

    Raises:
        FileNotFoundError: a shard does not exist.
        ValueError: `ext` holds an empty entry, or no shards are given.
    """
    shards = local_paths(paths)
    wanted = None if ext is None else [alternatives(entry) for entry in ext]
    layouts: Counter[frozenset[str]] = Counter()
    counts: list[int] = []
    for shard, reached in _with_progress(shards, "Counting", progress):
        with suppress(OSError), shard.open("rb") as file:
            found, damage = _walk(shard, file, reached)
            layouts.update(frozenset(sample.components) for sample in found)
            if not damage:
                counts.append(len(found))
    if wanted is None:
        usual = layouts.most_common(1)[0][0] if layouts else ()
        wanted = [[extension] for extension in sorted(usual)]
    decoder = Decoder() if decode else None
    findings: list[Finding] = []
    for shard, reached in _with_progress(shards, "Verifying", progress):
        try:
            with shard.open("rb") as file:
                found, damage = _walk(shard, file, reached if decoder is None else None)
                findings += damage
                if not damage and counts:
                    findings += _near_empty(shard, len(found), statistics.median(counts))
                findings += _components(shard, found, wanted)
                findings += _labels(shard, found, file)
                if decoder is not None:
                    findings += _images(shard, found, file, decoder, reached)
        except OSError as error:
            detail = f"{error.strerror}. Check the rights, the disk and the mount"
            findings.append(Finding(shard, None, "unreadable", detail))
    return findings


def _with_progress(
    shards: Sequence[Path], what: str, progress: Progress
) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """Give each shard, and what to call with the bytes of it that are behind."""
    sizes = [os.path.getsize(shard) for shard in shards]
    total, before = max(sum(sizes), 1), 0
    for shard, size in zip(shards, sizes, strict=True):

        def reached(at: int, before: int = before) -> None:
            progress(what, (before + at) / total)

        yield shard, reached
        before += size
        progress(what, before / total)


def _walk(
    shard: Path, file: BinaryIO, reached: Callable[[int], None] | None
) -> tuple[list[Sample], list[Finding]]:
    def walked() -> Iterator[Member]:
        for i, member in enumerate(members(file)):
            if reached is not None and i % _EVERY == 0:
                reached(member.offset)
            yield member

    found: list[Sample] = []
    try:
        group(walked(), found)
    except DamagedTarError as error:
        key = found[-1].key if found else None
        after = f", after sample {key!r}" if found else ""
        return found, [Finding(shard, None, error.kind, f"{error}{after}. {REMEDIES[error.kind]}")]
    return found, []


def _near_empty(shard: Path, count: int, usual: float) -> Iterator[Finding]:
    if count == 0 or count < usual / 10:
        detail = f"{count:,} sample(s), where shards have {usual:,g} in the median. "
        remedy = "Leave it out, or write the samples to fewer shards"
        yield Finding(shard, None, "near-empty", detail + remedy)


def _components(shard: Path, found: list[Sample], wanted: list[list[str]]) -> Iterator[Finding]:
    seen: set[str] = set()
    for sample in found:

        def finding(problem: str, detail: str, key: str = sample.key) -> Finding:
            return Finding(shard, key, problem, detail)

        if sample.key in seen:
            yield finding(
                "duplicate component",
                f"{', '.join(map(repr, sample.components))}: the key is there a second time. Give keys once",
            )
        seen.add(sample.key)
        for extension, part in sample.components.items():
            if part.extension != extension:
                yield finding(
                    "upper-case extension",
                    f"{part.name!r}: shards.read ignores case, but DALI's own reader gives an empty "
                    "sample unless case_sensitive_extensions=False",
                )
        for output in wanted:
            if set(output) & sample.components.keys():
                continue
            dotted = [e for e in sample.components if "." in e and e.rpartition(".")[2] in output]
            if dotted:
                part = sample.components[dotted[0]]
                yield finding(
                    "dotted extension",
                    f"{part.name!r} has the extension {part.extension!r}, not {output[0]!r}: an extension "
                    "starts at the first dot of a file's name. Write the name without that dot",
                )
            else:
                has = ", ".join(map(repr, sorted(sample.components)))
                yield finding("missing component", f"no {' or '.join(output)!r}; it has {has}")


def _labels(shard: Path, found: list[Sample], file: BinaryIO) -> Iterator[Finding]:
    for sample in found:
        for extension, part in sample.components.items():
            if labels.is_label(extension):
                text = content(file, part, labels.LONGEST + 1)
                try:
                    labels.parse(text)
                except ValueError:
                    yield Finding(
                        shard, sample.key, "label", f"{extension!r} is {text[:60]!r}, no int64 number"
                    )


def _images(
    shard: Path, found: list[Sample], file: BinaryIO, decoder: Decoder, reached: Callable[[int], None]
) -> Iterator[Finding]:
    for sample in found:
        for extension, part in sample.components.items():
            reached(part.offset)
            complaint = decoder.complaint(content(file, part)) if is_image(extension) else None
            if complaint is not None:
                yield Finding(shard, sample.key, "image", f"{extension!r}: {complaint}")


def content(file: BinaryIO, part: Component, limit: int | None = None) -> bytes:
    """The bytes of a component, or the first `limit` of them."""
    file.seek(part.offset)
    return file.read(part.size if limit is None else min(part.size, limit))
