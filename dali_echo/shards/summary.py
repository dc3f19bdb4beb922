"""What is known of a shard without reading it: the first line of its index file.

DALI reads the version and the number of samples there and ignores the rest of that line:

    v1.2 3 {"dali_echo": 1, "shard_bytes": 10240, "shard_mtime_ns": 17…, "index_bytes": 91, "layouts": …}
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

FORMAT = 1  # raise it whenever an older index would be wrong
_LINE = re.compile(r"v1\.2 (\d{1,18}) (\{.*\})\s*")


@dataclass(frozen=True)
class Summary:
    """What an index file of ours tells of its shard.

    Attributes:
        samples: how many there are.
        layouts: each distinct set of lower-case extensions, with the key of the first sample
            that has exactly these.
        not_integer: for each label extension with a component that spells no integer, the key
            and the text of the first.
        shard_bytes: the size of the shard that was indexed,
        shard_mtime_ns: and the time when it was last changed, in nanoseconds.
        index_bytes: how many bytes follow the first line.
    """

    samples: int
    layouts: list[tuple[list[str], str]]
    not_integer: dict[str, tuple[str, str]]
    shard_bytes: int
    shard_mtime_ns: int
    index_bytes: int

    def line(self) -> str:
        """Spell it as the first line of an index file, in ASCII."""
        known = asdict(self)
        return f"v1.2 {known.pop('samples')} {json.dumps({'dali_echo': FORMAT, **known})}\n"


def is_ours(line: str) -> bool:
    """Whether a first line was written by any version of this package."""
    return _known(line) is not None


def parse(line: str) -> Summary | None:
    """Read the first line of an index file; None if another program or version wrote it."""
    known = _known(line)
    if known is None or known.pop("dali_echo") != FORMAT:
        return None
    try:
        return Summary(**known)  # type: ignore[arg-type]
    except TypeError:
        return None


def _known(line: str) -> dict[str, object] | None:
    match = _LINE.fullmatch(line)
    try:
        known = json.loads(match[2]) if match else {}
    except ValueError:
        return None
    return {"samples": int(match[1]), **known} if match and "dali_echo" in known else None
