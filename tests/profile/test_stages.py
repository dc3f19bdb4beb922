"""The stages of a definition, found without running it, and the parts cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import nvidia.dali
import nvidia.dali.fn as fn
import pytest
from nvidia.dali import types

from dali_echo import echo, pipeline_def
from dali_echo import shards as dali_shards
from dali_echo.profile.cuts import Definition
from dali_echo.profile.stages import STAGES
from tests.streams import BATCH, SAMPLES, decode, echoed, read, rows

CPU = {"batch_size": BATCH, "num_threads": 2, "device_id": None, "seed": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pipeline_def(**CPU)
def photos(shards: Sequence[str], decoder: str = "image", device: str = "cpu") -> Any:
    jpeg, label = dali_shards.read(shards, ext=["jpg", "cls"], name="train")
    image = getattr(fn.decoders, decoder)(jpeg, device=device, output_type=types.RGB)
    image, label = echo(image, label)
    image, label = echo(image, label)
    image = fn.rotate(image, angle=fn.random.uniform(range=[-9.0, 9.0]))
    return image, label.gpu() if device == "mixed" else label


def test_stages(shards: Sequence[str]) -> None:
    definition = Definition(lambda: photos(shards))
    assert definition.stages == ["read", "decode", "augment"]
    assert len(definition.marks) == 2
    assert definition.random_decoders == []
    on_gpu = Definition(lambda: photos(shards, device="mixed", device_id=0))
    assert on_gpu.stages == list(STAGES)
    assert on_gpu.uses_gpu == {"read": False, "decode": True, "augment": True, "transfer": False}


def test_a_crop_within_the_decoder_decodes(shards: Sequence[str]) -> None:
    definition = Definition(lambda: photos(shards, "image_random_crop"))
    assert definition.stages == ["read", "decode", "augment"]
    assert definition.random_decoders == ["decoders.ImageRandomCrop"]


def test_what_leads_to_a_decoder_decodes_and_a_label_is_read(shards: Sequence[str]) -> None:
    @nvidia.dali.pipeline_def(**CPU)
    def encrypted() -> Any:
        jpeg, label = dali_shards.read(shards, ext=["jpg", "cls"], name="train")
        jpeg = fn.python_function(jpeg, function=lambda data: data)
        return fn.decoders.image(jpeg), label

    definition = Definition(encrypted)
    assert definition.stages == ["read", "decode"]
    jpeg, label = definition.up_to("read").run()
    assert bytes(np.asarray(jpeg[0])[:2]) == b"\xff\xd8"
    assert np.asarray(label[0]).dtype == np.int64


def test_without_a_decoder_there_is_no_such_stage() -> None:
    @nvidia.dali.pipeline_def(**CPU)
    def arrays() -> Any:
        image = fn.external_source(lambda: [np.zeros((4, 4, 3), np.uint8)] * BATCH)
        return fn.flip(image, horizontal=fn.random.coin_flip())

    assert Definition(arrays).stages == ["read", "augment"]


def test_an_echo_between_parts_emits_what_the_definition_does(shards: Sequence[str]) -> None:
    definition = Definition(lambda: echoed(shards))
    for place in ("read", "decode"):
        upstream = definition.up_to(place)
        pipeline = definition.echoed(place, definition.stages[-1], upstream, factor=2)
        seen = [row for _ in range(2 * SAMPLES // BATCH) for row in rows(pipeline.run())]
        assert all(image == label for image, label, _, _ in seen)
        (stats,) = pipeline.echo_stats()
        assert stats.emitted == len(seen)
        assert stats.fresh <= len(seen) / 2 + 4 * BATCH


def test_a_part_is_fed_from_memory(shards: Sequence[str]) -> None:
    definition = Definition(lambda: photos(shards))
    batches = [definition.up_to("read").run()]
    held = definition.held("read", lambda: batches[0])
    images, labels = definition.echoed("read", "decode", held, factor=1).run()
    numbers = [decode(np.asarray(images[i])) for i in range(len(images))]
    assert numbers == [int(np.asarray(labels[i])) for i in range(len(labels))]
    assert numbers == [int(np.asarray(batches[0][1][i])) for i in range(BATCH)]


def test_a_definition_that_skips_damaged_samples_at_its_mark(shards: Sequence[str]) -> None:
    @pipeline_def(**CPU)
    def skipping() -> Any:
        jpeg, label = dali_shards.read(shards, ext=["jpg", "cls"], name="train", on_error="skip")
        image = fn.decoders.image(jpeg, device="cpu", output_type=types.RGB)
        return echo(image, label, factor="auto")

    definition = Definition(skipping)
    assert definition.stages == ["read", "decode"]
    images, labels = definition.echoed("read", "decode", definition.up_to("read"), factor=1).run()
    assert decode(np.asarray(images[0])) == int(np.asarray(labels[0]))


def test_conditionals(shards: Sequence[str]) -> None:
    @pipeline_def(**CPU, enable_conditionals=True)
    def flipped() -> Any:
        jpeg, label = read(shards)
        image = fn.decoders.image(jpeg, device="cpu")
        if fn.random.coin_flip(dtype=types.BOOL):
            image = fn.flip(image)
        return image, label

    definition = Definition(flipped)
    held = definition.up_to("decode")
    images, labels = definition.echoed("decode", "augment", held, factor=2).run()
    assert [decode(np.asarray(images[i])) for i in range(BATCH)] == [
        int(bytes(np.asarray(labels[i]))) for i in range(BATCH)
    ]


def test_a_python_function_runs_in_its_own_stage_only(shards: Sequence[str]) -> None:
    seen = {"read": 0, "decode": 0}

    @pipeline_def(**CPU)
    def counted() -> Any:
        def count(name: str) -> Any:
            def function(data: Any) -> Any:
                seen[name] += 1
                return data

            return function

        jpeg, _ = read(shards)
        image = fn.decoders.image(fn.python_function(jpeg, function=count("read")), device="cpu")
        fn.python_function(image, function=count("decode"))
        return fn.resize(image, size=[4, 4])

    definition = Definition(counted)
    assert definition.stages == ["read", "decode", "augment"]
    definition.up_to("read").run()
    assert seen == {"read": 0, "decode": 0}
    definition.up_to("decode").run()
    assert seen["read"] > 0


def test_what_is_no_pipeline_is_refused(shards: Sequence[str]) -> None:
    made = photos(shards)
    nothing = nvidia.dali.pipeline_def(**CPU)(lambda: fn.random.uniform(shape=[2]))
    seeds = iter(range(9))

    @nvidia.dali.pipeline_def(**CPU)
    def another() -> Any:
        jpeg, label = read(shards)
        return (jpeg, label) if next(seeds) else jpeg

    class Old(nvidia.dali.Pipeline):  # type: ignore[misc]
        def define_graph(self) -> Any:
            return fn.random.uniform()

    for make, message in (
        (lambda: 3, "returned 3, which is no pipeline"),
        (lambda: made, "made before"),
        (nothing, "holds no reader"),
        (lambda: Old(4, 1, None), "use pipeline_def instead of define_graph"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Definition(make)
    definition = Definition(another)
    with pytest.raises(ValueError, match="another pipeline"):
        definition.up_to("read")
