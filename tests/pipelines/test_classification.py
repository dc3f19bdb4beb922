from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
import torch
import webdataset
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from PIL import Image

from dali_echo.pytorch import EchoIterator
from pipelines.classification import (
    OUTPUTS,
    READER,
    Crop,
    EchoStage,
    ImageFormat,
    training,
    validation,
)

SAMPLES, BATCH = 40, 8
PLAIN = ImageFormat(size=16, mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def image_of(number: int) -> np.ndarray:
    """16 × 16, brightness says which; brighter to the lower right, so that windows differ."""
    rows, columns = np.mgrid[:16, :16]
    grey = 4 * number + rows + 2 * columns
    return np.stack([grey, grey + 10, grey + 20], axis=2).astype(np.uint8)


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("shards") / "train-0000.tar"
    with webdataset.TarWriter(str(path)) as tar:
        for number in range(SAMPLES):
            tar.write({"__key__": f"{number:03}", "png": image_of(number), "cls": number})
    return [str(path)]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """JPEGs of several sizes, some grey."""
    path = tmp_path_factory.mktemp("photos") / "train-0000.tar"
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number in range(SAMPLES):
            file = io.BytesIO()
            mode = "L" if number % 3 == 0 else "RGB"
            Image.new(mode, (50 + number, 90 - number), 100).save(file, "JPEG")
            sample = {"jpg": file.getvalue(), "cls": str(number).encode()}
            tar.write({"__key__": f"{number:03}", **sample})
    return [str(path)]


def epoch(pipeline) -> dict[str, torch.Tensor]:
    batches = list(
        EchoIterator(pipeline, OUTPUTS, reader_name=READER, last_batch_policy=LastBatchPolicy.PARTIAL)
    )
    return {name: torch.cat([batch[name] for batch in batches]) for name in OUTPUTS}


def on_cpu(**options):
    return {"batch_size": BATCH, "num_threads": 1, "device_id": None, "seed": 3, **options}


@pytest.mark.parametrize("stage", list(EchoStage))
def test_training(urls, stage):
    seen = epoch(training(urls, PLAIN, stage, 2, **on_cpu()))
    uses = 1 if stage is EchoStage.NONE else 2
    assert seen["image"].shape == (uses * SAMPLES, 3, 16, 16)
    assert seen["image"].dtype == torch.float32
    assert seen["label"].dtype == torch.int64
    # Uses of the epoch's last samples may fall into the next one, for which it reads ahead.
    counts = Counter(seen["label"].tolist())
    assert counts.total() == uses * SAMPLES
    assert max(counts.values()) <= 2 * uses
    views: dict[int, set[bytes]] = {}
    for image, label in zip(seen["image"], seen["label"], strict=True):
        # The pixels are those of the image that the label names, in a window with black around.
        assert set(image.unique().tolist()) <= {0.0, *image_of(int(label)).ravel().tolist()}
        views.setdefault(int(label), set()).add(image.numpy().tobytes())
    twice = [len(views[label]) for label, count in counts.items() if count == 2]
    if stage in (EchoStage.READ, EchoStage.DECODE):
        assert np.mean(twice) > 1.9, "each use is to have a view of its own"
    elif stage in (EchoStage.AUGMENT, EchoStage.BATCH):
        assert np.mean(twice) < 1.1, "all uses are to have the same view"


def test_a_batch_is_replayed_whole(urls):
    pipeline = training(urls, PLAIN, EchoStage.BATCH, 2, **on_cpu())
    iterator = iter(EchoIterator(pipeline, OUTPUTS, reader_name=READER))
    batches = [next(iterator)["label"].tolist() for _ in range(6)]
    assert batches[0::2] == batches[1::2]
    assert batches[0] != batches[2]


def test_options_reach_the_mark(urls):
    pipeline = training(urls, PLAIN, EchoStage.DECODE, 2.5, 30, **on_cpu())
    assert len(epoch(pipeline)["label"]) == 2.5 * SAMPLES
    with pytest.raises(ValueError, match="shuffle_buffer = 3"):
        training(urls, PLAIN, EchoStage.DECODE, 2, 3, **on_cpu())


def test_training_windows_are_cut_from_a_black_border(urls):
    images = ImageFormat(size=16, mean=(0, 0, 0), std=(1, 1, 1), padding=2)
    seen = epoch(training(urls, images, **on_cpu()))
    offsets, flips = set(), 0
    for image, label in zip(seen["image"].numpy(), seen["label"].tolist(), strict=True):
        padded = np.pad(image_of(label).transpose(2, 0, 1), ((0, 0), (2, 2), (2, 2)))
        found = [
            (y, x, flip)
            for y in range(5)
            for x in range(5)
            for flip in (1, -1)
            if (padded[:, y : y + 16, x : x + 16][:, :, ::flip] == image).all()
        ]
        assert len(found) == 1
        offsets.add(found[0][:2])
        flips += found[0][2] == -1
    assert {y for y, _ in offsets} == {x for _, x in offsets} == set(range(5))
    assert 0.2 < flips / SAMPLES < 0.8


def test_validation_is_in_order_and_normalized(urls):
    images = ImageFormat(size=16, mean=(10, 20, 30), std=(2, 4, 8))
    seen = epoch(validation(urls, images, **on_cpu(batch_size=7)))
    assert seen["label"].tolist() == list(range(SAMPLES))
    expected = np.stack([image_of(number) for number in range(SAMPLES)]).transpose(0, 3, 1, 2)
    for channel, (mean, std) in enumerate([(10, 2), (20, 4), (30, 8)]):
        np.testing.assert_allclose(
            seen["image"][:, channel], (expected[:, channel] - float(mean)) / std, rtol=1e-5
        )


def test_validation_of_small_and_large_images(urls):
    for size, inside in ((20, np.s_[2:18, 2:18]), (12, np.s_[:, :])):
        images = ImageFormat(size=size, mean=(0, 0, 0), std=(1, 1, 1))
        image = epoch(validation(urls, images, **on_cpu()))["image"][5, 0].numpy()
        whole = image_of(5)[..., 0]
        np.testing.assert_array_equal(image[inside], whole if size == 20 else whole[2:14, 2:14])
        assert image.sum() == image[inside].sum(), "the border is black"


@pytest.mark.parametrize("stage", [EchoStage.NONE, EchoStage.DECODE])
def test_photos_of_any_size(photos, stage):
    images = ImageFormat(size=32, mean=(0, 0, 0), std=(1, 1, 1), crop=Crop.RANDOM_RESIZED)
    for pipeline in (
        training(photos, images, stage, 2, **on_cpu()),
        validation(photos, images, **on_cpu()),
    ):
        seen = epoch(pipeline)
        assert seen["image"].shape[1:] == (3, 32, 32)
        # A grey photo becomes (100, 100, 100), another the red that 100 stands for.
        grey = seen["label"] % 3 == 0
        assert ((seen["image"][grey].mean(dim=(2, 3)) - 100).abs() < 3).all()
        assert (seen["image"][~grey][:, 2].mean(dim=(1, 2)) < 3).all()


def test_grey(urls):
    images = ImageFormat(size=16, mean=(0,), std=(1,))
    image = epoch(validation(urls, images, **on_cpu()))["image"]
    assert image.shape == (SAMPLES, 1, 16, 16)
    assert abs(float(image[0].mean()) - (image_of(0)[..., 1].mean())) < 3


def test_a_format_without_channels_that_agree_is_refused():
    with pytest.raises(ValueError, match=r"mean = \(1, 2\)"):
        ImageFormat(size=16, mean=(1, 2), std=(1, 2))


@pytest.mark.parametrize("crop", list(Crop))
@pytest.mark.parametrize("stage", list(EchoStage))
def test_devices_on_a_gpu(urls, stage, crop):
    """Traced, not built: that needs no GPU."""
    images = ImageFormat(size=16, mean=(0, 0, 0), std=(1, 1, 1), crop=crop)
    gpu = {**on_cpu(), "device_id": 0}
    devices = _devices(training(urls, images, stage, 2, **gpu))
    assert devices.pop("readers__Webdataset") == {"cpu"}
    assert devices.pop("decoders__Image") == {"mixed"}
    augmentation = {"RandomResizedCrop"} if crop is Crop.RANDOM_RESIZED else {"Crop", "CropMirrorNormalize"}
    for name in augmentation:
        assert devices[name] == {"gpu"}, name
    assert devices["CropMirrorNormalize"] == {"gpu"}
    devices = _devices(validation(urls, images, **gpu))
    assert devices["decoders__Image"] == {"mixed"}
    assert devices["CropMirrorNormalize"] == {"gpu"}


def _devices(pipeline) -> dict[str, set[str]]:
    """The devices of the operators of each kind, in all stages; outputs are on the GPU."""
    stages = getattr(pipeline, "stages", [pipeline])
    assert {output.device for output in stages[-1]._graph_out} == {"gpu"}
    devices: dict[str, set[str]] = {}
    nodes = [node for stage in stages for node in stage._graph_out]
    while nodes:
        operator = nodes.pop().source
        devices.setdefault(operator._op.schema.Name(), set()).add(operator._op.device)
        nodes += [node for node in operator.inputs if node.source is not None]
    return devices
