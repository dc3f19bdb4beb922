"""Echo of GPU outputs: mixed decode, replay without a way through the host, hand-over to torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nvidia.dali.fn as fn
import pytest
import torch
import webdataset
from nvidia.dali import types

from dali_echo import echo, pipeline_def
from dali_echo import shards as wds
from dali_echo.pytorch import EchoIterator
from dali_echo.testing import assert_resumes_exactly
from tests.shards.images import BAD
from tests.streams import BATCH, SAMPLES, decode, encode, read

pytestmark = pytest.mark.gpu


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=0, seed=11)
def mixed(shards: Sequence[str], factor: float | str, augment: bool = False) -> Any:
    """Images decoded by the GPU, and a random number that tells readings apart."""
    jpeg, _ = read(shards)
    image = fn.decoders.image(jpeg, device="mixed", output_type=types.RGB)
    image, reading = echo(image, fn.random.uniform(range=[0.0, 1.0]), factor=factor)
    if augment:
        image = fn.random_resized_crop(image, size=[8, 8], device="gpu")
    return image, reading


def iterate(pipeline: Any) -> EchoIterator:
    return EchoIterator(pipeline, ["image", "reading"], reader_name="train")


def test_images_stay_on_the_gpu_and_rows_stay_aligned(shards: Sequence[str]) -> None:
    seen = []
    for batch in iterate(mixed(shards, 3)):
        assert batch["image"].device == torch.device("cuda", 0)
        assert batch["reading"].device == torch.device("cpu")
        seen += [decode(image) for image in batch["image"].cpu().numpy()]
    assert set(seen) <= set(range(SAMPLES))
    assert len(set(seen)) > SAMPLES / 2


def test_repeats_are_bit_equal(shards: Sequence[str]) -> None:
    images: dict[float, list[torch.Tensor]] = {}
    for batch in iterate(mixed(shards, 3)):
        for image, reading in zip(batch["image"], batch["reading"].tolist(), strict=True):
            images.setdefault(reading, []).append(image.clone())
    repeated = [group for group in images.values() if len(group) == 3]
    assert len(repeated) > SAMPLES / 2
    assert all(torch.equal(group[0], other) for group in repeated for other in group[1:])


def test_the_replayed_memory_is_the_gpu_s(shards: Sequence[str]) -> None:
    pipeline = mixed(shards, 2)
    pipeline.build()
    fed = pipeline._source.feed(0, types.BatchInfo(0, 0))
    assert type(fed).__name__ == "TensorListGPU"


def test_batches_held_by_the_trainer_keep_their_values(shards: Sequence[str]) -> None:
    held = [(batch["image"], batch["image"].clone()) for batch in iterate(mixed(shards, 3, True))]
    torch.cuda.synchronize()
    assert all(torch.equal(image, copy) for image, copy in held)


def test_work_on_another_stream_sees_finished_images(shards: Sequence[str]) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sums = [batch["image"].float().sum().item() for batch in iterate(mixed(shards, 2, True))]
    again = [batch["image"].float().sum().item() for batch in iterate(mixed(shards, 2, True))]
    assert sums == again


def test_it_resumes_exactly(shards: Sequence[str]) -> None:
    assert_resumes_exactly(lambda: iterate(mixed(shards, 2.5, True, enable_checkpointing=True)), 20)


def test_damaged_images_are_left_out(tmp_path: Path) -> None:
    bad = {name: image for name, (image, _) in BAD.items()}
    path, log = tmp_path / "train.tar", tmp_path / "skipped.jsonl"
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number, image in enumerate([*bad.values(), *(encode(number) for number in range(100))]):
            tar.write({"__key__": f"{number:03}", "jpg": image, "cls": str(number - len(bad)).encode()})

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=0, seed=11)
    def skipping() -> Any:
        jpeg, label = wds.read(
            path, ["jpg", "cls"], name="train", on_error="skip", max_errors=100, error_log=log
        )
        image = fn.decoders.image(jpeg, device="mixed", output_type=types.RGB)
        return echo(image, label, factor=2)

    labels = [
        label
        for batch in EchoIterator(skipping(), ["image", "label"], reader_name="train")
        for label in batch["label"].tolist()
    ]
    assert min(labels) >= 0
    assert sorted(json.loads(line)["key"] for line in log.read_text().splitlines()) == [
        f"{number:03}" for number in range(len(bad))
    ]


def test_filling_the_time_keeps_images_on_the_gpu_and_intact(shards: Sequence[str]) -> None:
    iterator = iterate(mixed(shards, "fill", enable_checkpointing=True))
    images: dict[float, torch.Tensor] = {}
    for _ in range(3):
        for batch in iterator:
            assert batch["image"].device == torch.device("cuda", 0)
            assert len(set(batch["reading"].tolist())) == BATCH
            for image, reading in zip(batch["image"], batch["reading"].tolist(), strict=True):
                assert torch.equal(images.setdefault(reading, image.clone()), image)
    assert len(images) >= 3 * SAMPLES
    assert iterator.state_dict()
