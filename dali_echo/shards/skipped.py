"""skipped.jsonl: the samples that were left out, each named once."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path

_log = logging.getLogger("dali_echo")


class SkippedLog:
    """Names samples in the log, and in a file with a line of JSON for each: `shard`, `key`, `reason`.

    The ranks of a run, and a run that is resumed, share the file: none repeats what it holds.

    Args:
        path: of the file, which is made when there is something to write; None for no file.

    Raises:
        OSError: the file cannot be written; from `add` too.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._read_to = 0
        self._named: set[tuple[str, str]] = set()
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise OSError(f"error_log = {str(path)!r} cannot be written: name a file in a folder that can be")

    def add(self, shard: str, key: str, reason: str) -> None:
        """Name a sample, unless it has been."""
        if (shard, key) in self._named:
            return
        if self._path is not None and not self._append(shard, key, reason):
            return
        self._named.add((shard, key))
        _log.warning("left out: %s: sample %r: %s", shard, key, reason)

    def _append(self, shard: str, key: str, reason: str) -> bool:
        with open(self._path, "a+b") as file:  # type: ignore[arg-type]
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._read_to)
            *lines, rest = file.read().split(b"\n")
            self._named.update(filter(None, map(_parse, lines)))
            # A process that died while it wrote has left a line without an end.
            file.truncate(file.tell() - len(rest))
            new = (shard, key) not in self._named
            if new:
                line = json.dumps({"shard": shard, "key": key, "reason": reason})
                file.write(line.encode() + b"\n")
                file.flush()
            self._read_to = file.seek(0, os.SEEK_END)
        return new


def _parse(line: bytes) -> tuple[str, str] | None:
    try:
        entry = json.loads(line)
        return entry["shard"], entry["key"]
    except (ValueError, KeyError, TypeError):
        return None
