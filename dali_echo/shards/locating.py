"""From what a user writes for a set of shards to the files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from braceexpand import braceexpand


def local_paths(urls: str | Path | Iterable[str | Path]) -> list[Path]:
    """Expand brace patterns and `~`, keeping the order, and check that every file exists.

    Raises:
        FileNotFoundError: names the files that do not exist.
        ValueError: no shards at all, or a URL that is not a local path.
    """
    given = [urls] if isinstance(urls, str | Path) else list(urls)
    names = [name for url in given for name in braceexpand(str(url))]
    if not names:
        raise ValueError("no shards given: name at least one tar")
    for name in names:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", name):
            raise ValueError(
                f"{name!r}: only local shards are supported in this version; "
                "copy them to a disk, or mount them, and give their paths"
            )
    paths = [Path(name).expanduser() for name in names]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} shards do not exist: {', '.join(missing[:5])}{more}. "
            "Check the folder and the range in the braces"
        )
    return paths
