"""Shards at URLs: where they come from, and what they hold."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from dali_echo.shards import summary
from dali_echo.shards.bytestream import ByteStream
from dali_echo.shards.http import HttpSource
from dali_echo.shards.indexing import cache_folder, index_of, write_whole
from dali_echo.shards.patience import Patience
from dali_echo.shards.pipe import PipeSource, without_secrets
from dali_echo.shards.sources import Source
from dali_echo.shards.summary import Summary

log = logging.getLogger("dali_echo.shards")

_AT_A_TIME = 16  # shards asked for when a definition starts
_HUB = re.compile(r"hf://(?:(datasets|spaces)/)?([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")


@dataclass(frozen=True)
class RemoteShard:
    """A shard, its index file in the cache, what that tells, and what the source said of itself."""

    source: Source
    file: Path
    known: Summary
    size: int | None
    tag: str | None
    ranges: bool

    @property
    def shard(self) -> str:
        """How messages name it."""
        return self.source.shown

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.known.samples

    @property
    def layouts(self) -> list[tuple[list[str], str]]:
        """See `Summary`."""
        return self.known.layouts

    @property
    def not_integer(self) -> dict[str, tuple[str, str]]:
        """See `Summary`."""
        return self.known.not_integer


def source_of(url: str, allow_pipe: bool) -> Source:
    """Where the bytes of a URL come from.

    Raises:
        ValueError: a URL of no known kind, or a command that is not allowed.
    """
    if url.startswith("pipe:"):
        if not allow_pipe:
            raise ValueError(
                f"{shown(url)!r} runs a command in a shell: give allow_pipe=True if you trust whoever "
                "wrote it"
            )
        return PipeSource(url.removeprefix("pipe:"))
    scheme = urlsplit(url).scheme.lower()
    if scheme == "hf":
        return _of_hub(url)
    if scheme in ("http", "https") and urlsplit(url).hostname:
        return HttpSource(url, shown(url))
    raise ValueError(
        f"{shown(url)!r}: no kind of URL that is read: give a path, or http://, https://, hf:// or pipe:"
    )


def shown(url: str) -> str:
    """A URL without what may be secret: the user, and the query, which signed URLs have."""
    if url.startswith("pipe:"):
        return without_secrets(url)
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{unquote(parts.path)}{'?…' if parts.query else ''}"


def find(urls: Sequence[str], patience: Patience, allow_pipe: bool) -> list[RemoteShard]:
    """Look at each shard, and find its index: in the cache, beside it, or by reading the shard once.

    Raises:
        OSError: a shard that does not come: the URL, and the cause.
        ValueError: a shard that is damaged or empty, or see `source_of`.
    """
    sources = [source_of(url, allow_pipe) for url in urls]
    with ThreadPoolExecutor(_AT_A_TIME, "dali_echo-index") as pool:
        return list(pool.map(functools.partial(_find, patience=patience), urls, sources))


def _find(url: str, source: Source, patience: Patience) -> RemoteShard:
    stream = ByteStream(source, patience)
    try:
        if not isinstance(source, PipeSource):
            stream.open()
        known_by = repr((url, stream.size, stream.tag))
        place = cache_folder() / f"remote-{hashlib.sha256(known_by.encode()).hexdigest()[:32]}.idx"
        known = _valid(place, stream.size)
        if known is None:
            content = _beside(source, stream.size, patience) or _by_reading(source, stream)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, content, 0o644)
            known = cast(Summary, _parse(content, stream.size))
    finally:
        stream.close()
    return RemoteShard(source, place, known, stream.size, stream.tag, stream.ranges)


def _valid(place: Path, size: int | None) -> Summary | None:
    try:
        return _parse(place.read_bytes(), size)
    except OSError:
        return None


def _parse(content: bytes, size: int | None) -> Summary | None:
    """What a whole index of a shard of this size tells; None if it is none."""
    line, _, rest = content.partition(b"\n")
    known = summary.parse(line.decode("latin-1"))
    if known is None or known.index_bytes != len(rest) or size not in (None, known.shard_bytes):
        return None
    return known


def _beside(source: Source, size: int | None, patience: Patience) -> bytes | None:
    """The index file beside a shard, if there is one of the shard as it is."""
    if not isinstance(source, HttpSource):
        return None
    parts = urlsplit(source.url)
    url = urlunsplit(parts._replace(path=f"{parts.path}.idx"))
    stream = ByteStream(HttpSource(url, shown(url), source.token), patience)
    try:
        content = stream.read_all()
    except (FileNotFoundError, PermissionError):  # some servers do not tell which
        return None
    finally:
        stream.close()
    return content if _parse(content, size) else None


def _by_reading(source: Source, stream: ByteStream) -> bytes:
    """Index a shard while it is on disk, in a file without a name."""
    remedy = "" if isinstance(source, PipeSource) else ": put its index beside it (`dali-echo shards index`)"
    log.warning("%s: read once to count its samples, as there is no index%s", source.shown, remedy)
    with tempfile.TemporaryFile() as file:
        at = 0
        while data := stream.read(at, 1 << 20):
            file.write(data)
            at += len(data)
        known, text = index_of(source.shown, cast(BinaryIO, file), at, 0)
    return known.line().encode() + text


def _of_hub(url: str) -> HttpSource:
    """A file of the Hugging Face hub, with the token of `HF_TOKEN` or of `hf auth login`."""
    match = _HUB.fullmatch(url)
    if match is None:
        raise ValueError(
            f"{url!r}: expected hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REV/FILE"
        )
    kind, repository, revision, path = match.groups()
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    folder = f"{kind}/{repository}" if kind else repository
    at = f"{host}/{folder}/resolve/{quote(unquote(revision or 'main'), safe='')}/{quote(path)}"
    return HttpSource(at, url, os.environ.get("HF_TOKEN") or _saved_token())


def _saved_token() -> str | None:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    try:
        return (
            Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser().read_text().strip() or None
        )
    except OSError:
        return None
