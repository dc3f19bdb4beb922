"""DALI's index files for tar shards, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from dali_echo.shards import labels
from dali_echo.shards.locating import local_paths
from dali_echo.shards.walking import Sample, samples

_SEPARATOR = re.compile(r"[\s%]")
_VERSION = 1  # of what is cached: raise it whenever an older cache would be wrong


@dataclass(frozen=True)
class ShardIndex:
    """An index file, and what is known of its shard without reading it.

    Attributes:
        shard: the tar.
        file: its index file.
        samples: how many there are.
        layouts: each distinct set of lower-case extensions, with the key of the first sample
            that has exactly these.
        not_integer: for each label extension with a component that spells no integer, the key
            and the text of the first.
    """

    shard: Path
    file: Path
    samples: int
    layouts: list[tuple[list[str], str]]
    not_integer: dict[str, tuple[str, str]]


def index(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Give DALI's index file of each shard, in order, making those that are missing or stale.

    They are right for names of any length, spaces and letters (USTAR, PAX and GNU tars), for
    members in any order, directories, links and dotfiles. They live in `$XDG_CACHE_HOME` (or
    `~/.cache`) `/dali_echo/index`: a shard whose size or time of change differs gets a new one,
    and shards may lie in a folder that is read-only.

    Args:
        paths: local tars; `{0000..0009}` expands as in a shell.

    Raises:
        FileNotFoundError: a shard does not exist.
        ValueError: a shard is not a whole tar, or holds no sample.
    """
    return [shard_index(path).file for path in local_paths(paths)]


def shard_index(shard: Path) -> ShardIndex:
    """Index one shard, or find its index in the cache."""
    with shard.open("rb") as file:
        place, state = _hash(str(shard.resolve())), _state(os.fstat(file.fileno()))
        folder = _cache_folder()
        index_file, summary_file = folder / f"{place}-{state}.idx", folder / f"{place}-{state}.json"
        try:
            if index_file.exists():
                return ShardIndex(shard, index_file, **json.loads(summary_file.read_bytes()))
        except FileNotFoundError:
            pass
        found = samples(shard, file)
        built = ShardIndex(shard, index_file, len(found), _layouts(found), _odd_labels(found, file))
    summary = asdict(built)
    del summary["shard"], summary["file"]
    # Whoever else builds the same files at the same time writes the same bytes.
    _write(index_file, _text(found))
    _write(summary_file, json.dumps(summary))
    if _state(shard.stat()) == state:  # else a process that came later has indexed it as it is now
        for stale in set(folder.glob(f"{place}-*")) - {index_file, summary_file}:
            stale.unlink(missing_ok=True)
    return built


def _state(status: os.stat_result) -> str:
    return _hash(status.st_size, status.st_mtime_ns, _VERSION)


def _hash(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dali_echo/index"


def _text(found: Iterable[Sample]) -> str:
    lines = [
        " ".join(
            f"{escape(part.extension)} {part.offset} {part.size} {escape(part.name)}"
            for part in sample.components.values()
        )
        for sample in found
    ]
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""])


def escape(name: str) -> str:
    """Percent-encode white space, which separates the fields of an index, and the sign itself."""
    return _SEPARATOR.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)


def _layouts(found: Iterable[Sample]) -> list[tuple[list[str], str]]:
    first: dict[frozenset[str], str] = {}
    for sample in found:
        first.setdefault(frozenset(sample.components), sample.key)
    return [(sorted(extensions), key) for extensions, key in first.items()]


def _odd_labels(found: Iterable[Sample], file: BinaryIO) -> dict[str, tuple[str, str]]:
    odd: dict[str, tuple[str, str]] = {}
    for sample in found:
        for extension, part in sample.components.items():
            if extension in odd or not labels.is_label(extension):
                continue
            file.seek(part.offset)
            text = file.read(min(part.size, labels.LONGEST + 1))
            try:
                labels.parse(text)
            except ValueError:
                odd[extension] = (sample.key, text[:60].decode("latin-1"))
    return odd


def _write(path: Path, text: str) -> None:
    """Write a file that is seen whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    except OSError as error:
        raise OSError(
            f"index files of shards cannot be kept in {path.parent} ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        with open(handle, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
