"""From what a user writes for a set of shards to the files."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from braceexpand import braceexpand

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:")


def expand(urls: str | Path | Iterable[str | Path]) -> list[str]:
    """Expand what may stand for several shards, keeping the order.

    - Braces, as in a shell: `{0000..1023}`, `{a,b}`; also in URLs.
    - Globs: `*`, `?`, `[…]`, `**` for folders of any depth; sorted. Index files are left out. A path
      that exists is taken as it is.
    - A text file, named `*.txt`: a path, URL or pattern per line, relative to its folder. Lines that
      are empty or start with `#` do not count.

    What starts with `scheme://` or `pipe:` is a URL: `pipe:` is left untouched, as braces and
    asterisks are its shell's.

    Raises:
        FileNotFoundError: a glob that matches nothing, a text file that does not exist.
        ValueError: no shards at all.
    """
    names = [name for given in _listed(urls) for name in _expand(given, Path())]
    if not names:
        raise ValueError("no shards given: name at least one tar")
    return names


def is_remote(url: str) -> bool:
    """Whether it is a URL, not a path."""
    return _REMOTE.match(url) is not None


def local_paths(urls: str | Path | Iterable[str | Path]) -> list[Path]:
    """Expand as `expand` does, and check that every file exists.

    Raises:
        FileNotFoundError: names the files, or the pattern, for which nothing exists.
        ValueError: no shards at all, a folder, or a URL that is not a local path.
    """
    names = expand(urls)
    for name in filter(is_remote, names):
        raise ValueError(
            f"{name!r}: only local shards are supported in this version; "
            "copy them to a disk, or mount them, and give their paths"
        )
    paths = [Path(name) for name in names]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} shards do not exist: {', '.join(missing[:5])}{more}. "
            "Check the folder and the range in the braces"
        )
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name the shards in it, such as '{path}/*.tar'")
    return paths


def _listed(urls: str | Path | Iterable[str | Path]) -> list[str]:
    return [str(urls)] if isinstance(urls, str | Path) else [str(url) for url in urls]


def _expand(given: str, folder: Path) -> Iterator[str]:
    if given.startswith("pipe:"):
        yield given
        return
    if not is_remote(given) and (folder / given).is_file():
        names: Iterable[str] = [given]  # whatever signs are in its name
    else:
        names = braceexpand(given)
    for name in names:
        if is_remote(name):
            yield name
            continue
        path = folder / Path(name).expanduser()
        if path.suffix.lower() == ".txt":
            yield from _text_file(path)
        elif glob.has_magic(name) and not path.exists():
            yield from _glob(str(path))
        else:
            yield str(path)


def _glob(pattern: str) -> list[str]:
    found = [path for path in glob.glob(pattern, recursive=True) if not path.endswith(".idx")]
    if not found:
        raise FileNotFoundError(f"no shard matches {pattern!r}: check the folder and the pattern")
    return sorted(found)


def _text_file(path: Path) -> Iterator[str]:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: a list of shards must be text in UTF-8") from None
    lines = [line.strip() for line in text.splitlines()]
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise ValueError(f"{path} lists no shard: write a path or URL on each line")
    for name in names:
        if not is_remote(name) and name.lower().endswith(".txt"):
            raise ValueError(f"{path}: {name!r} is a list, too. Name shards there")
        yield from _expand(name, path.parent)
