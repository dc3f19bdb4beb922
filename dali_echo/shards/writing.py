"""Writing samples to shards."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from webdataset.writer import TarWriter, make_encoder

from dali_echo.memory import parse_bytes
from dali_echo.shards.decoding import is_image

_encode = make_encoder(True)  # by extension
_BLOCK = 512
_END = 10_240  # the last record of a tar is filled up to as much


def write(
    samples: Iterable[Mapping[str, Any]],
    pattern: str | Path,
    *,
    max_samples: int = 10_000,
    max_bytes: int | str = "1GiB",
) -> list[Path]:
    """Write samples to WebDataset shards, and give the shards' paths.

    The shards appear when all are written, or not at all. The same samples make the same bytes.

    Args:
        samples: mappings with the `"__key__"` of the sample and its components by extension: bytes,
            or what WebDataset encodes by extension, such as an int for `cls` or an array for `png`.
            `read` shuffles within a window only, so give them in random order.
        pattern: the shards' names, with their number as in `"train-%04d.tar"`.
        max_samples: samples in a shard, at most.
        max_bytes: a shard's size, at most, unless one sample is larger. An integer or `"512MiB"`.

    Raises:
        FileExistsError: there is a shard of this pattern already.
        ValueError: a key or an extension that would be read back as another one, a key that its
            shard has already, no sample, or a pattern or limit that is none.
    """
    folder, name = Path(pattern).expanduser().parent, Path(pattern).name
    limit = parse_bytes(max_bytes)
    if max_samples < 1:
        raise ValueError(f"max_samples = {max_samples}: give at least 1")
    _check_pattern(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as staged:
        written = _write(Path(staged), name, samples, max_samples, limit)
        if not written:
            raise ValueError(f"there is no sample to write to {pattern}")
        return [path.replace(folder / path.name) for path in written]


def image_folder(folder: Path, *, seed: int = 0) -> list[tuple[Path, int]]:
    """The images of class sub-folders, in random order, with the class as its place in the alphabet.

    Raises:
        ValueError: there is no sub-folder, or no image in one.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} has no sub-folders: expected one for each class, with its images")
    images = []
    for number, label in enumerate(classes):
        inside = sorted(path for path in label.rglob("*") if is_image(path.suffix[1:].lower()))
        if not inside:
            raise ValueError(f"{label} holds no image: remove it, or put the images of the class there")
        images += [(path, number) for path in inside]
    random.Random(seed).shuffle(images)
    return images


def image_samples(folder: Path, images: Iterable[tuple[Path, int]]) -> Iterator[dict[str, Any]]:
    """Samples of what `image_folder` gives: the image with its extension, and the class as `cls`.

    `jpeg` becomes `jpg`. The key is the path in the folder, with its dots as `_`.
    """
    for path, number in images:
        extension = path.suffix[1:].lower()
        key = str(path.relative_to(folder)).replace(".", "_")
        yield {"__key__": key, {"jpeg": "jpg"}.get(extension, extension): path.read_bytes(), "cls": number}


def _check_pattern(folder: Path, name: str) -> None:
    if not re.fullmatch(r"[^%]*%\d*d[^%]*\.tar", name):
        raise ValueError(f"pattern {name!r}: expected one number and .tar, such as 'train-%04d.tar'")
    there = sorted(folder.glob(re.sub(r"%\d*d", "*", name)))
    if there:
        raise FileExistsError(
            f"{folder} has {len(there)} shard(s) of the pattern {name!r} already, such as {there[0].name}: "
            "remove them, or choose another name"
        )


def _write(
    folder: Path, name: str, samples: Iterable[Mapping[str, Any]], max_samples: int, limit: int
) -> list[Path]:
    written: list[Path] = []
    keys: set[str] = set()
    used = 0
    with ExitStack() as shard:
        for given in samples:
            sample = _encoded(given)
            size = sum(
                _BLOCK + -(-len(part) // _BLOCK) * _BLOCK for e, part in sample.items() if e != "__key__"
            )
            if not written or len(keys) == max_samples or used + size > limit - _END:
                shard.close()
                written.append(folder / (name % len(written)))
                file = shard.enter_context(written[-1].open("wb"))
                # A fixed time makes shards that are the same each time, without a header more per member.
                tar = shard.enter_context(TarWriter(file, encoder=False, mtime=0))
                keys, used = set(), 0
            if sample["__key__"] in keys:
                raise ValueError(f"key {sample['__key__']!r} is there twice: give samples distinct keys")
            tar.write(sample)
            keys.add(sample["__key__"])
            used += size
    return written


def _encoded(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Encode the components, making sure that the sample is read back as it is."""
    key = sample.get("__key__")
    base = key.rpartition("/")[2] if isinstance(key, str) else ""
    if not base or "." in base or "\0" in base:
        raise ValueError(
            f"__key__ {key!r}: expected a name without a dot in its last part, such as 'cat/0001'"
        )
    components = {e: part for e, part in sample.items() if not e.startswith("__")}
    odd = [e for e in components if not e.strip(".") or e != e.lower() or e[0] in "_." or "/" in e]
    if odd or not components:
        raise ValueError(
            f"sample {key!r} has the components {sorted(components)}: expected at least one, named by "
            "extensions in lower case such as 'jpg'"
        )
    try:
        return {"__key__": key, **_encode(components)}
    except ValueError as error:
        raise ValueError(f"sample {key!r}: {error}. Give that component as bytes") from error
