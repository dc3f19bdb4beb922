"""`dali-echo profile` on small pipelines whose bottleneck is known, because a part of them waits."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from dali_echo.cli import app

# Events that nobody sets: waiting for one takes as long as its timeout, and no core.
SOURCE = """
from threading import Event
import numpy as np
import nvidia.dali
from nvidia.dali import fn, types
from dali_echo import echo, pipeline_def, shards

CPU = dict(batch_size=4, num_threads=1, device_id=None, seed=1)
rows = [np.full((8, 8, 3), number, np.uint8) for number in range(4)]
steps = []

def waiting(seconds):
    return lambda: Event().wait(seconds) or rows

@pipeline_def(**CPU)
def slow(seconds=0.02):
    image = echo(fn.external_source(waiting(seconds)), factor=3)
    return fn.crop_mirror_normalize(image, mirror=fn.random.coin_flip())

@nvidia.dali.pipeline_def(**CPU)
def photos(urls, decoder="image"):
    jpeg, label = shards.read(urls, ext=["jpg", "cls"], name="train")
    image = getattr(fn.decoders, decoder)(jpeg, output_type=types.RGB)
    return fn.resize(image, size=[8, 8]), label

def made_for_me():
    return slow(0.001)

def step(batch):
    steps.append({name: (tuple(value.shape), value.dtype) for name, value in batch.items()})

def slow_step(batch):
    Event().wait(0.02)

def no_pipeline():
    return 3

def fails():
    raise KeyError("where is it")

@pipeline_def(**CPU)
def fails_to_run():
    return fn.resize(fn.decoders.image(fn.external_source(lambda: [np.zeros(9, np.uint8)] * 4)), size=[4, 4])

@pipeline_def(**CPU)
def raises():
    def source():
        raise OSError("the server is gone")
    return fn.flip(fn.external_source(source))

@pipeline_def(**CPU)
def short(batches=2):
    return fn.flip(fn.external_source(iter([rows] * batches)))

@pipeline_def(**CPU)
def two_batches_again_and_again():
    return fn.flip(fn.external_source([rows] * 2, cycle="raise"))

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with these definitions in the current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    name = f"definitions_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


def call(*arguments: Any) -> tuple[int, str, str]:
    """The exit code, and what goes to standard output and standard error."""
    given = ["profile", *map(str, arguments), "--seconds", "0"]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_source_that_waits_is_the_bottleneck(module: str) -> None:
    code, out, _ = call(f"{module}:slow", "--json", "--device-id", "none", "--num-threads", 2)
    assert code == 0
    found = json.loads(out)
    assert {"stages", "marks", "best", "bottleneck", "predicted_speedup", "batches"} <= found.keys()
    assert [stage["name"] for stage in found["stages"]] == ["read", "augment"]
    assert all({"s_per_sample", "n", "spread"} <= stage.keys() for stage in found["stages"])
    assert [mark["after"] for mark in found["marks"]] == ["read", "augment", "batch"]
    assert found["bottleneck"] == "read"
    assert found["marks"][0]["R"] > 1.5
    best = found["best"]
    assert best["after"] == "read"
    assert best["factor"] >= found["predicted_speedup"] > 1
    assert best["shuffle_buffer"] == 16
    assert best["memory_bytes"] == 16 * 8 * 8 * 3
    assert found["stages"][0]["n"] == found["rounds"] >= 5
    assert found["batches"] >= 3 * found["rounds"]
    # It waits without work, and what follows it waits for it.
    assert found["stages"][0]["cpu_s_per_sample"] < found["stages"][0]["s_per_sample"]
    assert found["marks"][0]["starved"] > found["marks"][0]["blocked"]


def test_a_step_that_waits_leaves_nothing_to_gain(module: str) -> None:
    code, out, _ = call(f"{module}:made_for_me", "--step", f"{module}:slow_step", "--outputs", "image")
    assert code == 0
    assert "Echo would not help here: the accelerator is the bottleneck (R = 0." in out
    assert "the step waits for" in out
    assert "Measured without the definition's own marks: echo0." in out


def test_the_step_gets_what_the_iterator_gives(module: str, shards: Sequence[str]) -> None:
    arguments = ["--arg", f"urls={shards!r}", "--step", f"{module}:step", "--outputs", "image, label"]
    code, out, _ = call(f"{module}:photos", *arguments, "--batch-size", 8, "--json")
    assert code == 0
    found = json.loads(out)
    assert [stage["name"] for stage in found["stages"]] == ["read", "decode", "augment", "step"]
    assert found["step_waits"] > 0
    import torch

    seen = sys.modules[module].steps[-1]
    assert seen == {"image": ((8, 8, 8, 3), torch.uint8), "label": ((8,), torch.int64)}


def test_memory_sets_the_buffer(module: str) -> None:
    arguments = [f"{module}:slow", "--arg", "seconds=0.003", "--json", "--memory"]
    best = json.loads(call(*arguments, "19200B")[1])["best"]
    assert (best["shuffle_buffer"], best["memory_bytes"]) == (100, 19200)
    found = json.loads(call(*arguments, "700B")[1])
    assert found["best"] is None
    assert found["predicted_speedup"] == 1
    assert "Echo would not help here: 700 bytes hold no batch of samples" in found["advice"][0]


def test_a_crop_within_the_decoder_is_told_of(module: str, shards: Sequence[str]) -> None:
    arguments = ["--arg", f"urls={shards[0]}", "--arg", "decoder=image_random_crop"]
    code, out, _ = call(f"{module}:photos", *arguments, "--plot", "profile.png")
    assert code == 0
    assert "decoders.ImageRandomCrop draws at random while decoding: repeats after decode" in out
    assert "Without --step" in out
    assert Image.open("profile.png").format == "PNG"


def test_a_source_that_ends_is_started_again(module: str) -> None:
    assert call(f"{module}:two_batches_again_and_again")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere:training"], "cannot import 'nowhere': ModuleNotFoundError: No module named 'nowhere'"),
        (["MODULE"], "give MODULE:NAME"),
        (["MODULE:nothing"], "has no 'nothing'. It has"),
        (["MODULE:number"], "is 3: give a function decorated with dali_echo.pipeline_def"),
        (["MODULE:no_pipeline"], "it returned 3, which is no pipeline"),
        (["MODULE:photos"], "missing 1 required positional argument: 'urls'"),
        (["MODULE:photos", "--arg", "urls=none.tar"], "do not exist: none.tar"),
        (["MODULE:photos", "--arg", "urls"], "'urls': give NAME=VALUE"),
        (["MODULE:slow", "--device-id", "gpu"], "device_id = 'gpu'"),
        (["MODULE:slow", "--memory", "much"], "'much' is no size"),
        (["MODULE:slow", "--arg", "seconds=0.001", "--plot", "profile.what"], "what"),
        (["MODULE:slow", "--step", "MODULE:number"], "is 3: give a function that takes a batch"),
        (["MODULE:slow", "--step", "MODULE:step"], "a different name for each of the pipeline's 1 outputs"),
        (["MODULE:fails"], "KeyError: 'where is it'"),
        (["MODULE:fails_to_run"], "decoders.image"),
        (["MODULE:raises"], "the server is gone"),
        (["MODULE:short"], "the source ended and gives nothing when it starts again"),
    ],
)
def test_errors_are_one_line_and_end_with_2(module: str, arguments: list[str], message: str) -> None:
    code, out, err = call(*(argument.replace("MODULE", module) for argument in arguments))
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1
