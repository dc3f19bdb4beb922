"""Epochs as PyTorch code sees them: through EchoIterator, and through DALI's own iterator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import nvidia.dali.fn as fn
import pytest
import torch
from nvidia.dali import types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_echo import echo, pipeline_def
from dali_echo.pytorch import EchoIterator
from tests.streams import BATCH, SAMPLES, decode, read

NAMES = ["image", "reading"]


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, seed=11)
def images(
    shards: Sequence[str], reader: dict[str, Any] | None = None, factor: Any = None, unit: str = "sample"
) -> Any:
    """Images, and a random number that tells readings of the same sample apart."""
    jpeg, _ = read(shards, **(reader or {}))
    image, reading = fn.decoders.image(jpeg, output_type=types.RGB), fn.random.uniform()
    return echo(image, reading, factor=factor, unit=unit) if factor else (image, reading)


def epoch(iterator: Any) -> list[list[tuple[int, float]]]:
    """The rows of one epoch, batch by batch."""
    batches = []
    for batch in iterator:
        batch = batch[0] if isinstance(batch, list) else batch
        assert list(batch) == NAMES
        numbers = [decode(image) for image in batch["image"].numpy()]
        batches.append(list(zip(numbers, batch["reading"].tolist(), strict=True)))
    return batches


@pytest.mark.parametrize("factor", [1, 2.5, 3])
@pytest.mark.parametrize("unit", ["sample", "batch"])
@pytest.mark.parametrize(
    "reader", [{}, {"pad_last_batch": True}, {"num_shards": 2, "shard_id": 1}, {"num_shards": 3}]
)
def test_partial_epochs_have_every_sample_and_lose_no_use(
    shards: Sequence[str], reader: dict[str, Any], factor: float, unit: str
) -> None:
    iterator = EchoIterator(
        images(shards, reader, factor, unit),
        NAMES,
        reader_name="train",
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )
    lengths, total = [], 0
    for _ in range(3):
        expected = len(iterator)
        batches = epoch(iterator)
        assert len(batches) == expected
        assert all(len(batch) == BATCH for batch in batches[:-1])
        lengths.append(sum(map(len, batches)))
        total += lengths[-1]
    ranks = reader.get("num_shards", 1)
    assert max(lengths) - min(lengths) <= 1
    assert total == round(SAMPLES * factor) * 3 // ranks
    (stats,) = iterator.stats
    assert stats.emitted == total


@pytest.mark.parametrize("factor", [1, 3])
def test_over_all_epochs_each_reading_is_used_as_planned(shards: Sequence[str], factor: int) -> None:
    iterator = EchoIterator(
        images(shards, None, factor),
        NAMES,
        reader_name="train",
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )
    counts = Counter(row for _ in range(4) for batch in epoch(iterator) for row in batch)
    (stats,) = iterator.stats
    finished = [row for row, count in counts.items() if count == factor]
    assert max(counts.values()) == factor
    assert len(finished) == stats.fresh - stats.live_samples


def test_fill_goes_on_with_the_next_epoch_and_counts_it_there(shards: Sequence[str]) -> None:
    iterator = EchoIterator(images(shards, None, 3), NAMES, reader_name="train")
    lengths = []
    for _ in range(4):
        expected = len(iterator)
        lengths.append(len(epoch(iterator)))
        assert lengths[-1] == expected
    assert lengths == [24, 23, 24, 23]
    assert sum(lengths) * BATCH - 4 * 3 * SAMPLES < BATCH


def test_fill_copies_the_last_sample_if_the_reader_pads(shards: Sequence[str]) -> None:
    iterator = EchoIterator(images(shards, {"pad_last_batch": True}, 3), NAMES, reader_name="train")
    for _ in range(3):
        batches = epoch(iterator)
        assert len(batches) == 24
        samples = 3 * SAMPLES - 23 * BATCH
        assert len(set(batches[-1])) == samples
        assert set(batches[-1][samples:]) == {batches[-1][samples - 1]}


def test_drop_leaves_the_rest_to_the_next_epoch(shards: Sequence[str]) -> None:
    iterator = EchoIterator(
        images(shards, None, 3), NAMES, reader_name="train", last_batch_policy=LastBatchPolicy.DROP
    )
    for number in range(1, 4):
        assert len(iterator) == 23
        assert [len(batch) for batch in epoch(iterator)] == [BATCH] * 23
        assert iterator.stats[0].emitted == number * 23 * BATCH


def test_a_schedule_sets_the_length_of_each_epoch(shards: Sequence[str]) -> None:
    iterator = EchoIterator(
        images(shards, None, lambda epoch: 1 + epoch),
        NAMES,
        reader_name="train",
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )
    assert [sum(map(len, epoch(iterator))) for _ in range(3)] == [250, 500, 750]


@pytest.mark.parametrize("policy", list(LastBatchPolicy))
@pytest.mark.parametrize(
    "reader",
    [{}, {"pad_last_batch": True}, {"pad_last_batch": True, "num_shards": 2, "shard_id": 1}],
)
@pytest.mark.parametrize("factor", [2.5, 3])
def test_dali_s_own_iterator_counts_right(
    shards: Sequence[str], factor: float, reader: dict[str, Any], policy: LastBatchPolicy
) -> None:
    iterator = DALIGenericIterator(
        images(shards, reader, factor),
        NAMES,
        reader_name="train",
        last_batch_policy=policy,
        auto_reset=True,
    )
    pads, ranks = "pad_last_batch" in reader, reader.get("num_shards", 1)
    samples = round(SAMPLES * factor) // ranks
    total = 0
    for _ in range(3):
        expected = len(iterator)
        batches = epoch(iterator)
        got = sum(map(len, batches))
        total += got
        assert len(batches) == expected
        if policy == LastBatchPolicy.PARTIAL:
            assert samples <= got <= samples + 1
        elif policy == LastBatchPolicy.DROP:
            assert got == samples // BATCH * BATCH
        elif pads:
            assert got == -(-samples // BATCH) * BATCH
    if policy == LastBatchPolicy.FILL and not pads:
        assert 3 * samples <= total < 3 * samples + BATCH


def test_the_named_reader_defines_the_epoch(shards: Sequence[str]) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11)
    def two() -> Any:
        every, _ = read(shards)
        first, _ = fn.readers.webdataset(paths=shards[:1], ext=["jpg", "cls"], name="first")
        return echo(fn.decoders.image(every), fn.decoders.image(first), factor=2)

    for reader, samples in (("first", 100), ("train", SAMPLES)):
        iterator = EchoIterator(
            two(), ["a", "b"], reader_name=reader, last_batch_policy=LastBatchPolicy.PARTIAL
        )
        assert sum(len(batch["a"]) for batch in iterator) == 2 * samples


def test_without_a_mark_it_is_dali_s_iterator(shards: Sequence[str]) -> None:
    for policy in LastBatchPolicy:
        ours = EchoIterator(images(shards), NAMES, reader_name="train", last_batch_policy=policy)
        theirs = DALIGenericIterator(
            images(shards), NAMES, reader_name="train", last_batch_policy=policy, auto_reset=True
        )
        assert ours.stats == []
        for _ in range(2):
            assert len(ours) == len(theirs)
            assert epoch(ours) == epoch(theirs)


def test_a_loop_that_was_left_is_continued(shards: Sequence[str]) -> None:
    whole = EchoIterator(images(shards, None, 2), NAMES, reader_name="train")
    left = EchoIterator(images(shards, None, 2), NAMES, reader_name="train")
    expected = epoch(whole)
    first = [next(iter(left)) for _ in range(5)]
    assert [decode(image) for batch in first for image in batch["image"].numpy()] == [
        number for batch in expected[:5] for number, _ in batch
    ]
    assert epoch(left) == expected[5:]
    assert epoch(left) == epoch(whole)


def test_tensors_are_dense_and_the_caller_s_own(shards: Sequence[str]) -> None:
    iterator = EchoIterator(images(shards, None, 3), NAMES, reader_name="train")
    for batch in iterator:
        assert batch["image"].shape == (BATCH, 10, 12, 3)
        assert batch["image"].dtype == torch.uint8
        assert batch["reading"].shape == (BATCH,)
        assert all(decode(image) < SAMPLES for image in batch["image"].numpy())
        batch["image"].fill_(255)


def test_held_batches_keep_their_values(shards: Sequence[str]) -> None:
    iterator = EchoIterator(images(shards, None, 3), NAMES, reader_name="train")
    held = [(batch, batch["image"].clone()) for batch in iterator]
    assert all(torch.equal(batch["image"], copy) for batch, copy in held)


def test_without_a_reader_the_loop_ends_with_the_source() -> None:
    @pipeline_def(batch_size=4, num_threads=1, device_id=None, seed=1)
    def numbers() -> Any:
        source = [[torch.tensor(4.0 * b + i).numpy() for i in range(4)] for b in range(5)]
        return echo(fn.external_source(source=source, cycle="raise"), factor=2)

    iterator = EchoIterator(numbers(), ["number"])
    with pytest.raises(TypeError, match="no len without reader_name"):
        len(iterator)
    for _ in range(2):
        got = Counter(value for batch in iterator for value in batch["number"].tolist())
        assert got == Counter({float(number): 2 for number in range(20)})


@pytest.mark.parametrize("names", [["image"], ["image", "image"], "ab", ["a", "b", "c"]])
def test_names_that_do_not_fit_are_refused(shards: Sequence[str], names: Any) -> None:
    with pytest.raises(ValueError, match="must be a list of different names, one for each .* 2 outputs"):
        EchoIterator(images(shards, None, 2), names)


def test_an_unknown_reader_is_refused(shards: Sequence[str]) -> None:
    with pytest.raises(ValueError, match=r"reader_name = 'val' is not among \['train'\]"):
        EchoIterator(images(shards, None, 2), NAMES, reader_name="val")


def test_another_type_of_policy_is_refused(shards: Sequence[str]) -> None:
    with pytest.raises(TypeError, match="last_batch_policy = 'partial' must be a member of"):
        EchoIterator(images(shards, None, 2), NAMES, last_batch_policy="partial")  # type: ignore[arg-type]


def test_a_pipeline_that_has_run_is_refused(shards: Sequence[str]) -> None:
    pipeline = images(shards, None, 2)
    pipeline.run()
    with pytest.raises(RuntimeError, match="give the iterator a new pipeline"):
        EchoIterator(pipeline, NAMES, reader_name="train", last_batch_policy=LastBatchPolicy.PARTIAL)


def test_samples_of_different_shapes_are_refused_with_the_output_s_name(shards: Sequence[str]) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=11)
    def ragged() -> Any:
        jpeg, _ = echo(*read(shards))
        return fn.resize(fn.decoders.image(jpeg), size=fn.random.uniform(range=[4, 20], shape=[2]))

    with pytest.raises(ValueError, match="output 'image' differ in shape.* resize, crop or pad"):
        next(iter(EchoIterator(ragged(), ["image"], reader_name="train")))
