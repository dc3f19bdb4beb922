"""Checkpoints: exact at every step, small, and refused where they do not belong."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import pytest
import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_echo import echo, pipeline_def
from dali_echo.pytorch import EchoIterator
from dali_echo.state import dump, load
from dali_echo.testing import assert_resumes_exactly
from tests.streams import read

NAMES = ["image", "before", "after"]
Marks = list[dict[str, Any]]


@pipeline_def(batch_size=24, num_threads=2, device_id=None, seed=11, enable_checkpointing=True)
def resumable(
    shards: Sequence[str], marks: Marks, reader: dict[str, Any] | None = None, spread: bool = False
) -> Any:
    """Images, and random numbers from before and after the marks."""
    jpeg, _ = read(shards, random_shuffle=True, initial_fill=64, **(reader or {}))
    before = fn.random.uniform(range=[0.0, 1.0])
    image = fn.decoders.image(jpeg)
    for mark in marks:
        image, before = echo(image, before + fn.random.uniform(range=[0.0, 1.0]), **mark)
    if spread:
        image = fn.flip(image)
    return image, before, fn.random.uniform(range=[0.0, 1.0])


def iterate(
    pipeline: Any, policy: LastBatchPolicy = LastBatchPolicy.PARTIAL, names: Sequence[str] = NAMES
) -> EchoIterator:
    return EchoIterator(pipeline, names, reader_name="train", last_batch_policy=policy)


CHAINS: dict[str, Marks] = {
    "no mark": [],
    "integer": [{"factor": 2}],
    "fraction": [{"factor": 2.5, "shuffle_buffer": 72}],
    "one": [{"factor": 1}],
    "schedule": [{"factor": lambda epoch: 1 + epoch}],
    "batches": [{"factor": 2, "unit": "batch"}],
    "shuffled batches": [{"factor": 2.5, "unit": "batch", "shuffle_buffer": 3}],
    "chain": [{"factor": 2}, {"factor": 1.5}],
    "chain of units": [{"factor": 1.5, "unit": "batch"}, {"factor": 2}],
}


@pytest.mark.parametrize("marks", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("policy", list(LastBatchPolicy), ids=lambda policy: policy.name)
@pytest.mark.parametrize("reader", [{}, {"pad_last_batch": True, "num_shards": 3, "shard_id": 1}])
def test_a_state_of_any_step_resumes_bit_for_bit(
    shards: Sequence[str], marks: Marks, policy: LastBatchPolicy, reader: dict[str, Any]
) -> None:
    assert_resumes_exactly(lambda: iterate(resumable(shards, marks, reader), policy), 14)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_reader_s_batches_of_copies_alone_do_not_disturb_it(shards: Sequence[str], factor: int) -> None:
    # Shards of 83, 83 and 84 samples, padded to two batches of 83 each.
    reader = {"pad_last_batch": True, "num_shards": 3, "shard_id": 0}

    def make() -> EchoIterator:
        mark = {"factor": factor, "shuffle_buffer": 500}
        return iterate(resumable(shards, [mark], reader, batch_size=83), LastBatchPolicy.FILL)

    assert_resumes_exactly(make, 18)


def test_a_state_of_a_resumed_run_resumes(shards: Sequence[str]) -> None:
    def make() -> EchoIterator:
        return iterate(resumable(shards, [{"factor": 3}]))

    whole, states = make(), []
    batches = [next(whole) for _ in range(30)]
    state = make().state_dict()
    for step in range(30):
        resumed = make()
        resumed.load_state_dict(state)
        batch = next(resumed)
        assert all(torch.equal(batch[name], batches[step][name]) for name in NAMES)
        state = resumed.state_dict()
        states.append(state)


def test_without_a_seed_a_state_resumes_all_the_same(shards: Sequence[str]) -> None:
    assert_resumes_exactly(lambda: iterate(resumable(shards, [{"factor": 2.5}, {}], seed=None)), 12)


def test_dali_s_own_checkpoint_argument_resumes(shards: Sequence[str]) -> None:
    marks: Marks = [{"factor": 2.5}, {"factor": 2, "unit": "batch"}]
    whole = resumable(shards, marks)
    for _ in range(17):
        whole.run()
    checkpoint = whole.checkpoint()
    resumed = resumable(shards, marks, checkpoint=checkpoint)
    for _ in range(20):
        for expected, got in zip(whole.run(), resumed.run(), strict=True):
            assert np.array_equal(expected.as_array(), got.as_array())
    assert resumed.is_restored_from_checkpoint


def test_dali_s_own_iterator_resumes(shards: Sequence[str]) -> None:
    def make(**kwargs: Any) -> DALIGenericIterator:
        pipeline = resumable(shards, [{"factor": 2.5}], {"pad_last_batch": True}, **kwargs)
        return DALIGenericIterator(
            pipeline, NAMES, reader_name="train", last_batch_policy=LastBatchPolicy.PARTIAL
        )

    whole = make()
    for _ in range(9):
        next(whole)
    resumed = make(checkpoint=whole.checkpoints()[0])
    expected, got = list(whole), list(resumed)
    assert len(expected) == len(got) == len(whole) - 9
    for a, b in zip(expected, got, strict=True):
        assert all(torch.equal(a[0][name], b[0][name]) for name in NAMES)


def test_restoring_reads_no_more_than_the_batches_of_live_samples(shards: Sequence[str]) -> None:
    made = 0

    def count(info: Any) -> Any:
        nonlocal made
        made += 1
        return [np.float32(24 * info.iteration + i) for i in range(24)]

    @pipeline_def(batch_size=24, num_threads=1, device_id=None, seed=3, enable_checkpointing=True)
    def numbers() -> Any:
        source = fn.external_source(source=count, batch_info=True)
        return echo(source, factor=3, shuffle_buffer=96)

    iterator = EchoIterator(numbers(), ["number"])
    for _ in range(100):
        next(iterator)
    state = iterator.state_dict()
    following = next(iterator)["number"]
    resumed = EchoIterator(numbers(), ["number"])
    made = 0
    resumed.load_state_dict(state)
    assert torch.equal(next(resumed)["number"], following)
    # The age bound of a buffer of 4 batches, and what is read ahead.
    assert made <= 8 + 5


def test_a_state_is_small_and_plain(shards: Sequence[str]) -> None:
    iterator = iterate(resumable(shards, [{"factor": 4, "shuffle_buffer": 8192}], batch_size=256))
    while iterator.stats[0].live_samples < 7000:
        try:
            next(iterator)
        except StopIteration:
            continue
    state = iterator.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 64_000
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


DIFFERENT: dict[str, Callable[[Sequence[str]], EchoIterator]] = {
    "batch_size: 24 in the checkpoint, 16 here": lambda shards: iterate(
        resumable(shards, [{"factor": 2}], batch_size=16)
    ),
    "seed: 11 in the checkpoint, 12 here": lambda shards: iterate(
        resumable(shards, [{"factor": 2}], seed=12)
    ),
    "factor of 'echo0': 2.0 in the checkpoint, 3.0 here": lambda shards: iterate(
        resumable(shards, [{"factor": 3}])
    ),
    "shuffle_buffer of 'echo0': 96 in the checkpoint, 48 here": lambda shards: iterate(
        resumable(shards, [{"factor": 2, "shuffle_buffer": 48}])
    ),
    "unit of 'echo0': 'sample' in the checkpoint, 'batch' here": lambda shards: iterate(
        resumable(shards, [{"factor": 2, "unit": "batch"}])
    ),
    "operators after 'echo0': 'random.Uniform' in the checkpoint, 'Flip": lambda shards: iterate(
        resumable(shards, [{"factor": 2}], spread=True)
    ),
    "readers: ": lambda shards: iterate(resumable(shards, [{"factor": 2}], {"num_shards": 2, "shard_id": 1})),
    "last_batch_policy: 'PARTIAL' in the checkpoint, 'DROP' here": lambda shards: iterate(
        resumable(shards, [{"factor": 2}]), LastBatchPolicy.DROP
    ),
    "factor of 'echo1': None in the checkpoint, 2.0 here": lambda shards: iterate(
        resumable(shards, [{"factor": 2}, {}])
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_state_of_another_pipeline_is_refused_with_what_differs(
    shards: Sequence[str], difference: str
) -> None:
    state = iterate(resumable(shards, [{"factor": 2}])).state_dict()
    with pytest.raises(ValueError, match="is of another pipeline") as error:
        DIFFERENT[difference](shards).load_state_dict(state)
    assert difference in str(error.value)


def test_a_checkpoint_of_another_pipeline_is_refused_by_the_factory_s_pipeline(
    shards: Sequence[str],
) -> None:
    checkpoint = resumable(shards, [{"factor": 2}]).checkpoint()
    with pytest.raises(ValueError, match="factor of 'echo0': 2.0 in the checkpoint, 3.0 here"):
        resumable(shards, [{"factor": 3}], checkpoint=checkpoint).build()


def test_every_field_that_differs_is_named(shards: Sequence[str]) -> None:
    state = iterate(resumable(shards, [{"factor": 2}])).state_dict()
    with pytest.raises(ValueError, match="batch_size: .*; factor of .*; seed: .*"):
        iterate(resumable(shards, [{"factor": 3}], batch_size=16, seed=1)).load_state_dict(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "only a part of one"),
        (lambda text: "", "no checkpoint of an echo pipeline"),
        (lambda text: text.replace("PARTIAL", "partial"), "is damaged"),
        (lambda text: json.dumps({**json.loads(text), "version": 99}), "has version 99"),
        (lambda text: "[1, 2]", "no checkpoint of an echo pipeline"),
    ],
)
def test_a_damaged_state_is_refused(
    shards: Sequence[str], damage: Callable[[str], str], message: str
) -> None:
    state = iterate(resumable(shards, [{"factor": 2}])).state_dict()
    with pytest.raises(ValueError, match=message):
        iterate(resumable(shards, [{"factor": 2}])).load_state_dict({"dali_echo": damage(state["dali_echo"])})


def test_a_dictionary_of_something_else_is_refused(shards: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="no checkpoint of an echo pipeline"):
        iterate(resumable(shards, [{"factor": 2}])).load_state_dict({"model": 1})


def test_without_checkpointing_there_is_no_state(shards: Sequence[str]) -> None:
    pipeline = resumable(shards, [{"factor": 2}], enable_checkpointing=False)
    with pytest.raises(ValueError, match="make it with enable_checkpointing=True"):
        iterate(pipeline).state_dict()
    with pytest.raises(ValueError, match="make it with enable_checkpointing=True"):
        pipeline.checkpoint()


def test_an_iterator_that_has_begun_takes_no_state(shards: Sequence[str]) -> None:
    iterator = iterate(resumable(shards, [{"factor": 2}]))
    state = iterator.state_dict()
    next(iterator)
    with pytest.raises(RuntimeError, match="load the state into a new one"):
        iterator.load_state_dict(state)


def test_the_check_finds_a_stream_that_does_not_resume(shards: Sequence[str]) -> None:
    calls = 0

    @pipeline_def(batch_size=24, num_threads=1, device_id=None, seed=3, enable_checkpointing=True)
    def drifting() -> Any:
        def number() -> Any:
            nonlocal calls
            calls += 1
            return [np.float32(calls)] * 24

        return echo(fn.external_source(source=number), factor=2)

    with (
        pytest.warns(Warning, match="Checkpointing enabled"),
        pytest.raises(AssertionError, match="differs in 'number'"),
    ):
        assert_resumes_exactly(lambda: EchoIterator(drifting(), ["number"]), 4)


def test_documents_keep_values_bytes_and_columns() -> None:
    state = {"n": 1, "s": "text", "b": b"\x00\xff", "a": np.array([0, 3, 70000]), "none": None}
    loaded = load(dump(state))
    assert np.array_equal(loaded.pop("a"), state.pop("a"))
    assert loaded == state
