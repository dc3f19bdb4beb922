"""Image classification from WebDataset shards, with the echo mark at any stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline

from dali_echo import echo, pipeline_def, shards

READER = "shards"
"""The reader's name in both pipelines, for `reader_name` of an iterator."""

OUTPUTS = ("image", "label")
"""What both pipelines return: float32 (B, channels, size, size), and int64 (B,)."""


EchoFactor = float | Literal["auto", "fill"]
"""A mean number of uses, or how to find it; see `dali_echo.echo`."""


class EchoStage(str, Enum):
    """The stage whose results are replayed; everything after it runs once for each use."""

    NONE = "none"
    READ = "read"
    DECODE = "decode"
    AUGMENT = "augment"
    BATCH = "batch"


class Crop(str, Enum):
    """How a training image is cut from a photo, and what validation looks at."""

    PAD = "pad"
    """A random window of the image with a black border; its centre. For small images."""
    RANDOM_RESIZED = "random-resized"
    """A random part of random size, scaled; the centre of the photo. For photos of any size."""


@dataclass(frozen=True)
class ImageFormat:
    """What a network is fed."""

    size: int
    """Height and width in pixels."""
    mean: tuple[float, ...]
    """Of each channel, in 0 to 255; one entry makes grey images, three RGB."""
    std: tuple[float, ...]
    """Standard deviation of each channel, in 0 to 255."""
    crop: Crop = Crop.PAD
    padding: int = 4
    """Width in pixels of the border around an image, for `Crop.PAD`."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(
                f"mean = {self.mean} and std = {self.std}: give both one entry, for grey images, "
                f"or both three, for RGB"
            )


@pipeline_def
def training(
    urls: Sequence[str | Path],
    images: ImageFormat,
    echo_stage: EchoStage = EchoStage.NONE,
    echo_factor: EchoFactor = 2,
    shuffle_buffer: int | None = None,
    error_log: str | Path | None = None,
    max_errors: float | None = None,
) -> tuple[DataNode, ...]:
    """Shuffled, augmented images and their labels; on the GPU when there is a `device_id`.

    A shuffle buffer holds samples, and for `EchoStage.BATCH` batches. With an `error_log`, images that do not
    decode are left out, at most `max_errors`, and named there.
    """

    def mark(stage: EchoStage, *nodes: DataNode) -> Any:
        if stage is EchoStage.DECODE and echo_stage is EchoStage.NONE and error_log is not None:
            return echo(*nodes, factor=1)  # a mark is where they are left out
        if stage is not echo_stage:
            return nodes
        unit = "batch" if stage is EchoStage.BATCH else "sample"
        return echo(*nodes, factor=echo_factor, unit=unit, shuffle_buffer=shuffle_buffer)

    encoded, label = shards.read(
        urls,
        ext=["jpg;jpeg;png", "cls"],
        name=READER,
        on_error="raise" if error_log is None else "skip",
        max_errors=max_errors,
        error_log=error_log,
    )
    encoded, label = mark(EchoStage.READ, encoded, label)
    image = _decode(encoded, images)
    image, label = mark(EchoStage.DECODE, image, label)
    image = _augment(image, images)
    image, label = mark(EchoStage.AUGMENT, image, label)
    image, label = mark(EchoStage.BATCH, image, label)
    return image, _to_device(label)


@pipeline_def
def validation(urls: Sequence[str | Path], images: ImageFormat) -> tuple[DataNode, ...]:
    """Images in the order of the shards, without randomness, and their labels."""
    encoded, label = shards.read(urls, ext=["jpg;jpeg;png", "cls"], name=READER, shuffle=False)
    image = _decode(encoded, images)
    if images.crop is Crop.RANDOM_RESIZED:
        # The customary border of one eighth, left out of the centre crop.
        image = fn.resize(image, resize_shorter=images.size * 8 // 7)
    else:
        image = _on_black(image, images.size)
    return _normalize(image, images), _to_device(label)


def _decode(encoded: DataNode, images: ImageFormat) -> DataNode:
    # ANY_DATA would keep a grey photo grey among coloured ones, and crashes on grey JPEGs.
    output = types.GRAY if len(images.mean) == 1 else types.RGB
    return fn.decoders.image(encoded, device="mixed" if _on_gpu() else "cpu", output_type=output)


def _augment(image: DataNode, images: ImageFormat) -> DataNode:
    flip = fn.random.coin_flip()
    if images.crop is Crop.RANDOM_RESIZED:
        image = fn.random_resized_crop(image, size=[images.size, images.size])
        return _normalize(image, images, mirror=flip)
    image = _on_black(image, images.size + 2 * images.padding)
    x, y = (fn.random.uniform(range=(0.0, 1.0)) for _ in range(2))
    return _normalize(image, images, mirror=flip, crop_pos_x=x, crop_pos_y=y)


def _on_black(image: DataNode, size: int) -> DataNode:
    """The centre `size` × `size` pixels, of which those outside of the image are black."""
    return fn.crop(image, crop=(size, size), out_of_bounds_policy="pad", fill_values=0)


def _normalize(image: DataNode, images: ImageFormat, **window: DataNode) -> DataNode:
    return fn.crop_mirror_normalize(
        image,
        crop=(images.size, images.size),
        mean=list(images.mean),
        std=list(images.std),
        dtype=types.FLOAT,
        output_layout="CHW",
        rounding="round",
        **window,
    )


def _to_device(label: DataNode) -> DataNode:
    return label.gpu() if _on_gpu() else label


def _on_gpu() -> bool:
    return Pipeline.current().device_id is not None
