"""What shards hold, in numbers and as a picture."""

from __future__ import annotations

import io
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageDraw, ImageOps

from dali_echo.shards import labels
from dali_echo.shards.decoding import is_image
from dali_echo.shards.locating import local_paths
from dali_echo.shards.verifying import content
from dali_echo.shards.walking import samples

Track = Callable[[Sequence[Path], str], Iterable[Path]]
_T = TypeVar("_T")
_COLUMNS, _ROWS, _TILE, _CAPTION = 8, 6, 128, 14


@dataclass(frozen=True)
class Sizes:
    """The least, the median and the greatest of some numbers, and their sum."""

    least: int
    median: float
    greatest: int
    total: int


@dataclass(frozen=True)
class Info:
    """What shards hold.

    Attributes:
        samples: in each shard, in the order of the shards.
        components: for each lower-case extension, how many there are,
        bytes: and their sizes.
        classes: for each label extension whose components are all integers, how often each is there.
    """

    samples: dict[Path, int]
    components: dict[str, int]
    bytes: dict[str, Sizes]
    classes: dict[str, dict[int, int]]


def info(paths: str | Path | Iterable[str | Path], *, track: Track = lambda paths, _: paths) -> Info:
    """Count what shards hold.

    Raises:
        FileNotFoundError: a shard does not exist.
        ValueError: a shard is damaged or holds no sample: `verify` tells more.
    """
    counts: dict[Path, int] = {}
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    classes: defaultdict[str, Counter[int]] = defaultdict(Counter)
    no_class: set[str] = set()
    for shard in track(local_paths(paths), "Counting"):
        with shard.open("rb") as file:
            found = samples(shard, file)
            counts[shard] = len(found)
            for sample in found:
                for extension, part in sample.components.items():
                    sizes[extension].append(part.size)
                    if labels.is_label(extension):
                        try:
                            classes[extension][labels.parse(content(file, part, labels.LONGEST + 1))] += 1
                        except ValueError:
                            no_class.add(extension)
    return Info(
        samples=counts,
        components={extension: len(sizes[extension]) for extension in sorted(sizes)},
        bytes={extension: summarize(sizes[extension]) for extension in sorted(sizes)},
        classes={e: dict(sorted(classes[e].items())) for e in sorted(classes.keys() - no_class)},
    )


def summarize(numbers: Sequence[int]) -> Sizes:
    """Say how large some numbers are, of which there is at least one."""
    return Sizes(min(numbers), statistics.median(numbers), max(numbers), sum(numbers))


def preview(paths: str | Path | Iterable[str | Path], picture: Path) -> None:
    """Draw 48 images, spread evenly over the shards, with their keys.

    Raises:
        FileNotFoundError: a shard does not exist.
        ValueError: a shard is damaged, there is no image in any, or `picture` has the name of no
            format that Pillow writes.
    """
    images = list(islice(_some_images(local_paths(paths)), _COLUMNS * _ROWS))
    if not images:
        raise ValueError("no preview: none of the components has the extension of an image")
    rows = -(-len(images) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * _TILE, rows * (_TILE + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (key, image) in enumerate(images):
        x, y = place % _COLUMNS * _TILE, place // _COLUMNS * (_TILE + _CAPTION)
        sheet.paste(_tile(image), (x, y))
        draw.text((x + 2, y + _TILE + 1), key[-20:], "black")
    sheet.save(picture)


def _some_images(shards: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    chosen = _spread(shards, _COLUMNS * _ROWS)
    share = -(-_COLUMNS * _ROWS // len(chosen))
    for shard in chosen:
        with shard.open("rb") as file:
            for sample in _spread(samples(shard, file), share):
                part = next((p for e, p in sample.components.items() if is_image(e)), None)
                if part is not None:
                    yield sample.key, content(file, part)


def _spread(items: Sequence[_T], count: int) -> Sequence[_T]:
    """At most `count` of the items, at even distances."""
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else items


def _tile(image: bytes) -> Image.Image:
    tile = Image.new("RGB", (_TILE, _TILE), "white")
    try:
        thumbnail = ImageOps.exif_transpose(Image.open(io.BytesIO(image))).convert("RGB")
        thumbnail.thumbnail((_TILE - 4, _TILE - 4))
    except Exception as error:
        ImageDraw.Draw(tile).multiline_text((4, 4), f"does not\ndecode:\n{type(error).__name__}", "red")
        return tile
    tile.paste(thumbnail, ((_TILE - thumbnail.width) // 2, (_TILE - thumbnail.height) // 2))
    return tile
