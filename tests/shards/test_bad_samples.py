"""Samples that do not decode: left out, or named. The rows on decoding of DALI's public issues."""

import io
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import nvidia.dali
import pytest
from nvidia.dali import fn, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from PIL import Image, ImageOps

from dali_echo import echo, pipeline_def, shards
from dali_echo.pytorch import EchoIterator
from dali_echo.shards.screening import is_suspect, refusal
from dali_echo.shards.trial import shared
from dali_echo.testing import assert_resumes_exactly
from tests.shards.images import BAD, GOOD, encode

ODD_IMAGES = Path(os.environ.get("ODD_IMAGES", Path(__file__).parents[3] / "shared/data/odd-images"))
BATCH = 16


@pytest.fixture
def shard(write_tar, jpeg):
    """A function that writes a shard of images with labels, in which those of `bad` are among good ones."""

    def write(bad, good=90, name="train.tar"):
        images = {f"good/{number:03}": jpeg(number) for number in range(good)}
        images |= {f"bad/{key}": image for key, image in bad.items()}
        keys = sorted(images, key=lambda key: random.Random(key).random())
        members = []
        for key in keys:
            label = int(key[5:]) if key.startswith("good/") else -1
            members += [(f"{key}.jpg", images[key]), (f"{key}.cls", str(label).encode())]
        return write_tar(name, members)

    return write


def bad_images():
    return {name: image for name, (image, _) in BAD.items()}


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=5, enable_conditionals=True)
def training(path, log, mark, reader):
    reader = {"on_error": "skip", "max_errors": 1000, "error_log": log, **reader}
    image, label = shards.read(path, ext=["jpg", "cls"], name="train", **reader)
    image = fn.resize(fn.decoders.image(image, output_type=types.RGB), size=[8, 8])
    image, label = echo(image, label, **mark)
    if fn.random.coin_flip(dtype=types.BOOL):
        image = image ^ np.uint8(1)
    return image, label


def iterate(path, log, mark=None, enable_checkpointing=False, **reader):
    pipeline = training(path, log, mark or {"factor": 1}, reader, enable_checkpointing=enable_checkpointing)
    return EchoIterator(pipeline, ["image", "label"], reader_name="train")


def entries(log):
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def reported(log):
    return [entry["key"].removeprefix("bad/") for entry in entries(log)]


def test_an_epoch_goes_on_without_what_does_not_decode(shard, tmp_path, identify):
    # DALI#119, #211, #306, #1435, #3913, #2019: skip the bad image, keep the rest of its batch, go on.
    path, log = shard(bad_images()), tmp_path / "skipped.jsonl"
    batches = iterate(path, log)
    labels = []
    for batch in batches:
        assert len(batch["label"]) == BATCH
        for image, label in zip(batch["image"].numpy(), batch["label"].tolist(), strict=True):
            assert identify(image) == label
            labels.append(label)
    assert len(labels) == -(-(90 + len(BAD)) // BATCH) * BATCH
    assert set(labels) == set(range(90))
    # An epoch keeps its length: the stream goes on with the next pass.
    assert set(Counter(labels).values()) == {1, 2}
    stats = batches.stats[0]
    assert stats.fresh >= len(labels)
    assert len(BAD) <= stats.skipped <= 2 * len(BAD)
    assert sorted(reported(log)) == sorted(BAD)
    for entry in entries(log):
        assert entry.keys() == {"shard", "key", "reason"}
        assert entry["shard"] == str(path)
    for _ in range(3):
        assert all((batch["label"] >= 0).all() for batch in batches)
    assert batches.stats[0].skipped > 3 * len(BAD)
    assert len(reported(log)) == len(BAD)


def test_the_reasons(shard, tmp_path):
    path, log = shard(bad_images()), tmp_path / "skipped.jsonl"
    list(iterate(path, log))
    for entry in entries(log):
        pattern = BAD[entry["key"].removeprefix("bad/")][1]
        assert re.search(pattern, entry["reason"]), entry


def test_whatever_the_damage_exactly_what_dali_does_not_decode_is_left_out(shard, tmp_path):
    rng = random.Random(7)
    damaged = {}
    for number in range(200):
        name = rng.choice(list(GOOD))
        image = bytearray(GOOD[name])
        kind, at = rng.randrange(4), rng.randrange(len(image))
        if name == "webp" and kind == 2:  # what is not seen, and can crash DALI: see below
            kind = 0
        if kind == 0:
            del image[at:]
        elif kind == 1:
            del image[at : at + rng.choice([1, 3, 100])]
        elif kind == 2:
            for place in rng.choices(range(min(len(image), 600)), k=rng.choice([1, 1, 2, 8])):
                image[place] = rng.randrange(256)
        else:
            image[at:at] = rng.randbytes(rng.choice([1, 3, 100]))
        damaged[f"{number:03}"] = bytes(image)
    trial = shared()
    expected = {key for key, image in damaged.items() if not image or not trial.decodes(image)}
    assert 50 < len(expected) < 190
    for key in expected:
        image = np.frombuffer(damaged[key], np.uint8)
        assert refusal(image) is not None or is_suspect(image)
    log = tmp_path / "skipped.jsonl"
    list(iterate(shard(damaged), log))
    assert set(reported(log)) == expected


def unseen():
    """A WebP that DALI does not decode, as only a decoder sees: its first partition is too long."""
    image = bytearray(GOOD["webp"])
    image[22] = 0xFF
    array = np.frombuffer(bytes(image), np.uint8)
    assert refusal(array) is None
    assert not is_suspect(array)
    return bytes(image)


def in_another_process(function, *arguments):
    """Call one of this module where DALI may crash, as 2.4 does in about one of 170 batches that fail."""
    code = f"from {__name__} import *; {function.__name__}(*{[str(a) for a in arguments]})"
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        if done.returncode >= 0:
            break
    assert done.returncode == 0


def survive(path, log):
    labels = {label for batch in iterate(path, log) for label in batch["label"].tolist()}
    assert labels == set(range(90))
    assert reported(log) == ["it"]


def name_it(path):
    with pytest.raises(ValueError, match=f"{path}: sample 'bad/it': DALI does not decode it"):
        list(iterate(path, None, on_error="raise", max_errors=None))


def test_an_image_that_fails_in_the_decoder_is_found_and_left_out(shard, tmp_path):
    in_another_process(survive, shard({"it": unseen()}), tmp_path / "skipped.jsonl")


def test_an_image_that_fails_in_the_decoder_is_named(shard):
    in_another_process(name_it, shard({"it": unseen()}))


@pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason=f"there is no {ODD_IMAGES}")
def test_all_of_the_odd_images(shard, tmp_path):
    odd = {f.name: f.read_bytes() for f in ODD_IMAGES.iterdir() if f.suffix != ".tsv"}
    log = tmp_path / "skipped.jsonl"
    list(iterate(shard({name.replace(".", "_"): image for name, image in odd.items()}), log))
    trial = shared()
    assert set(reported(log)) == {n.replace(".", "_") for n, image in odd.items() if not trial.decodes(image)}
    assert {"pil_truncated_jpeg_jpg", "pil_chi_gif", "pil_broken_png"} < set(reported(log))
    assert "pil_sugarshack_mpo" not in reported(log)


@pytest.mark.parametrize("name", GOOD)
def test_any_mixture_arrives_as_rgb(write_tar, tmp_path, name):
    # DALI#1204, #695, #739: progressive, CMYK; others: palette, grey, 16 bits, alpha.
    mixture = [GOOD["jpeg"], GOOD[name], GOOD["png"]]
    members = [(f"{number}.jpg", image) for number, image in enumerate(mixture)]

    @pipeline_def(batch_size=3, num_threads=2, device_id=None)
    def decoded():
        image = shards.read(write_tar("a.tar", members), ext="jpg", name="train", shuffle=False)
        return fn.decoders.image(image, output_type=types.RGB)

    image = np.asarray(decoded().run()[0][1])
    assert image.shape == (30, 40, 3)
    if name not in ("16 bits", "jpeg 2000"):  # Pillow writes and reads these otherwise
        with Image.open(io.BytesIO(GOOD[name])) as opened:
            expected = np.asarray(opened.convert("RGB")).astype(int)
        assert abs(image.astype(int) - expected).mean() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotates(write_tar, orientation):
    # DALI#2660, #2940.
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encode("JPEG", exif=exif, subsampling=0, quality=95)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def decoded():
        image = shards.read(write_tar("a.tar", [("0.jpg", data)]), ext="jpg", name="train")
        return fn.decoders.image(image, output_type=types.RGB)

    got = np.asarray(decoded().run()[0][0]).astype(int)
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened)).astype(int)
    assert got.shape == expected.shape
    assert abs(got - expected).mean() < 2


@pytest.mark.parametrize("mark", [{"factor": 3}, {"factor": 2.5}, {"factor": 2, "memory_limit": "1MiB"}])
def test_good_samples_are_used_as_planned(shard, tmp_path, mark):
    batches = iterate(shard(bad_images()), tmp_path / "log", mark)
    uses, fresh = Counter(), 0
    for _ in range(3):
        for batch in batches:
            uses.update(batch["label"].tolist())
    fresh, live = batches.stats[0].fresh, batches.stats[0].live_samples
    assert uses.keys() == set(range(90))
    emitted = sum(uses.values())
    assert emitted == batches.stats[0].emitted
    left = round(fresh * mark["factor"]) - emitted
    assert live <= left <= live * 3
    # 3 epochs of the reader's samples, bad ones included.
    assert emitted >= 3 * round((90 + len(BAD)) * mark["factor"])


def test_whole_batches_without_their_bad_rows(shard, tmp_path):
    batches = iterate(shard(bad_images()), tmp_path / "log", {"factor": 2, "unit": "batch"})
    labels = [label for batch in batches for label in batch["label"].tolist()]
    assert -1 not in labels
    assert set(labels) == set(range(90))


def test_a_schedule_counts_good_samples(shard, tmp_path):
    batches = iterate(shard(bad_images()), tmp_path / "log", {"factor": lambda epoch: 1.5 + epoch})
    for _ in range(2):
        list(batches)
    stats = batches.stats[0]
    # Of each pass, round(n * f) uses are planned; the third pass has begun at most.
    planned = round(90 * 1.5) + round(90 * 2.5) + round((stats.fresh - 180) * 3.5)
    assert stats.fresh >= 180
    assert planned - stats.emitted >= stats.live_samples


def test_an_epoch_that_fills_time_has_every_good_sample(shard, tmp_path):
    path, log = shard(bad_images()), tmp_path / "skipped.jsonl"
    pipeline = training(path, log, {"factor": "fill"}, {})
    policy = LastBatchPolicy.PARTIAL
    batches = EchoIterator(pipeline, ["image", "label"], reader_name="train", last_batch_policy=policy)
    for epoch in range(1, 4):
        assert set(range(90)) == {label for batch in batches for label in batch["label"].tolist()}
        assert batches.stats[0].fresh < epoch * 90 + 2 * BATCH
    assert batches.stats[0].skipped >= 3 * len(BAD)


def test_a_run_of_nothing_but_bad_batches(shard, tmp_path):
    bad = {f"{number:03}": b"<html>" for number in range(70)}
    batches = iterate(shard(bad, good=20), tmp_path / "log", shuffle=False)
    labels = [label for batch in batches for label in batch["label"].tolist()]
    assert set(labels) == set(range(20))


@pytest.mark.parametrize("mark", [{"factor": 1}, {"factor": 2.5}, {"factor": 2, "unit": "batch"}])
@pytest.mark.parametrize("padded", [False, True])
def test_it_resumes_exactly(shard, tmp_path, mark, padded):
    path = shard(bad_images(), good=40)
    assert_resumes_exactly(
        lambda: iterate(path, tmp_path / "log", mark, enable_checkpointing=True, pad_last_batch=padded),
        steps=9,
    )
    assert sorted(reported(tmp_path / "log")) == sorted(BAD)


def test_ranks_take_the_same_steps_and_share_the_report(shard, tmp_path):
    path, log = shard(bad_images(), good=60), tmp_path / "log"
    steps, labels = [], set()
    for rank in range(2):
        batches = iterate(path, log, {"factor": 2}, shard_id=rank, num_shards=2)
        steps.append([])
        for _ in range(4):
            epoch = [batch["label"].tolist() for batch in batches]
            labels.update(label for batch in epoch for label in batch)
            steps[-1].append(len(epoch))
    assert steps[0] == steps[1]
    assert labels == set(range(60))
    assert sorted(reported(log)) == sorted(BAD)


def test_a_sample_is_left_out_if_any_of_its_images_is_bad(write_tar, jpeg, tmp_path, identify):
    pairs = [(jpeg(0), jpeg(0)), (jpeg(1), b""), (b"<html>", jpeg(2)), (jpeg(3), jpeg(3))]
    members = []
    for number, (left, right) in enumerate(pairs):
        members += [
            (f"{number}.left.jpg", left),
            (f"{number}.txt", b"GIF89a"),
            (f"{number}.right.png", right),
        ]

    @pipeline_def(batch_size=4, num_threads=2, device_id=None, seed=1)
    def both():
        left, text, right = shards.read(
            write_tar("a.tar", members),
            ext=["left.jpg", "txt", "right.png"],
            name="train",
            on_error="skip",
            error_log=tmp_path / "log",
        )
        left, right = (fn.decoders.image(image, output_type=types.RGB) for image in (left, right))
        return echo(left, text, right, factor=1)

    seen = set()
    pipeline = both()
    for _ in range(3):
        left, text, right = pipeline.run()
        for row in range(4):
            assert bytes(np.asarray(text[row])) == b"GIF89a"
            assert identify(np.asarray(left[row])) == identify(np.asarray(right[row]))
            seen.add(identify(np.asarray(left[row])))
    assert seen == {0, 3}
    assert sorted(reported(tmp_path / "log")) == ["1", "2"]


def test_two_readers(write_tar, jpeg, tmp_path):
    @pipeline_def(batch_size=3, num_threads=2, device_id=None, seed=1)
    def both():
        images = []
        for number, bad in enumerate([0, 2]):
            members = [(f"{i}.jpg", b"<html>" if i == bad else jpeg(i)) for i in range(3)]
            path = write_tar(f"{number}.tar", members)
            image = shards.read(
                path, "jpg", name=f"r{number}", shuffle=False, on_error="skip", error_log=tmp_path / "log"
            )
            images.append(fn.decoders.image(image, output_type=types.RGB))
        return echo(*images, factor=1)

    pipeline = both()
    pipeline.run()
    assert pipeline.echo_stats()[0].skipped >= 4  # 2 of each 3 rows
    assert len(entries(tmp_path / "log")) == 2


# on_error="raise"


@pytest.mark.parametrize("name", BAD.keys())
@pytest.mark.parametrize("marked", [False, True])
def test_the_error_names_the_sample(shard, name, marked):
    # DALI's own error names neither file nor reason: "nvImageCodec failure: '#3'".
    image, reason = BAD[name]

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=1)
    def decoded():
        image, label = shards.read(path, ["jpg", "cls"], name="train")
        image = fn.resize(fn.decoders.image(image, output_type=types.RGB), size=[8, 8])
        return echo(image, label) if marked else (image, label)

    path = shard({"it": image}, good=30)
    pipeline = decoded()
    with pytest.raises(ValueError, match=f"{path}: sample 'bad/it': .*{reason}"):
        for _ in range(3):
            pipeline.run()
    if not marked:
        with pytest.raises(ValueError, match="sample 'bad/it'"):
            for _ in EchoIterator(decoded(), ["image", "label"], reader_name="train"):
                pass


def test_images_that_nobody_decodes_are_no_error(shard):
    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=1)
    def encoded():
        return echo(shards.read(path, ["jpg"], name="train")[0])

    path = shard(bad_images(), good=10)
    pipeline = encoded()
    for _ in range(4):
        pipeline.run()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_grey_jpeg_does_not_crash_any_data(shard, tmp_path, on_error):
    @pipeline_def(batch_size=8, num_threads=2, device_id=None, seed=1)
    def decoded():
        image, label = shards.read(path, ["jpg", "cls"], name="train", on_error=on_error, error_log=log)
        return echo(fn.decoders.image(image, output_type=types.ANY_DATA), label)

    path, log = shard({"grey": GOOD["grey"], "cmyk": GOOD["cmyk"]}, good=10), tmp_path / "log"
    pipeline = decoded()
    if on_error == "raise":
        with pytest.raises(ValueError, match="sample 'bad/(grey|cmyk)': a JPEG with . channel.*types.RGB"):
            pipeline.run()
    else:
        for _ in range(4):
            pipeline.run()
        assert sorted(reported(log)) == ["cmyk", "grey"]


# What cannot be, and what is too much.


def test_without_a_mark(shard):
    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None)
    def unmarked():
        return shards.read(path, ["jpg", "cls"], name="train", on_error="skip", error_log=None)

    path = shard({}, good=3)
    with pytest.raises(ValueError, match=r'on_error="skip" .*echo\(image, label, factor=1\)'):
        unmarked()


def test_with_dali_s_own_decorator(shard):
    @nvidia.dali.pipeline_def(batch_size=BATCH, num_threads=2, device_id=None)
    def own():
        return shards.read(path, ["jpg", "cls"], name="train", on_error="skip", error_log=None)

    path = shard({}, good=3)
    with pytest.raises(ValueError, match=r"needs `dali_echo.pipeline_def`"):
        own()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "ignore"}, "on_error = 'ignore' is not known"),
        ({"on_error": "raise", "max_errors": 3}, 'on_error="raise" none'),
        ({"max_errors": 1.5}, "max_errors = 1.5 must be a number of samples"),
        ({"max_errors": -1}, "max_errors = -1 must"),
        ({"max_errors": True}, "max_errors = True must"),
        ({"ext": ["cls"]}, "no entry of ext = .* has an image's extension"),
    ],
)
def test_arguments_that_cannot_be(shard, arguments, message):
    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None)
    def refused():
        reader = {"ext": ["jpg"], "name": "train", "on_error": "skip", "error_log": None, **arguments}
        return shards.read(path, **reader)

    path = shard({}, good=3)
    with pytest.raises(ValueError, match=message):
        refused()


@pytest.mark.parametrize(
    ("max_errors", "bad", "message"),
    [
        (2, 3, r"3 of [\d,]+ samples read, 3 different ones, do not decode: more than max_errors = 2"),
        (0, 1, "more than max_errors = 0"),
        (0.01, 20, r"11 of [\d,]+ samples read, .*: more than max_errors = 0.01, and the latest is .*sample"),
        (None, 60, "51 of .*: more than max_errors = 0.05"),
        (50, 50, None),
        (0.9, 120, "101 samples in a row do not decode"),
        (120, 120, None),
    ],
)
def test_the_budget(shard, tmp_path, max_errors, bad, message):
    images = {f"{number:03}": b"<html>" for number in range(bad)}
    # The keys' order puts the bad ones in a row where there are no good ones.
    batches = iterate(
        shard(images, good=20 if bad < 100 else 1),
        tmp_path / "log",
        max_errors=max_errors,
        shuffle=False,
    )
    if message is None:
        list(batches)
        list(batches)  # a sample that is met again is not another one
    else:
        with pytest.raises(ValueError, match=message):
            for _ in range(3):
                list(batches)


def test_an_error_that_is_no_sample_s_is_not_survived(shard, tmp_path):
    calls = []

    def fails(image):
        calls.append(1)
        if len(calls) > 100:
            raise ValueError("mine")
        return image

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=1)
    def failing():
        image = shards.read(path, "jpg", name="train", on_error="skip", error_log=tmp_path / "log")
        image = fn.resize(fn.decoders.image(image, output_type=types.RGB), size=[8, 8])
        return echo(fn.python_function(image, function=fails), factor=1)

    path = shard({}, good=30)
    pipeline = failing()
    with pytest.raises(RuntimeError, match="mine"):
        for _ in range(10):
            pipeline.run()
    assert not (tmp_path / "log").exists()
