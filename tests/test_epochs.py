"""Epoch arithmetic, against DALI's own readers."""

from __future__ import annotations

import numpy as np
import nvidia.dali
import nvidia.dali.fn as fn
import pytest

from dali_echo.epochs import Cut, EmittedEpochs, Reader, ReadPosition, Run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("numbers")
    paths = [folder / f"{number:02}.npy" for number in range(26)]
    for number, path in enumerate(paths):
        np.save(path, np.array([number], np.int32))
    return [str(path) for path in paths]


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("sticks", [False, True])
@pytest.mark.parametrize(
    ("size", "shards", "batch"), [(10, 1, 4), (9, 2, 2), (7, 2, 2), (5, 2, 4), (26, 4, 6), (3, 1, 8)]
)
def test_the_position_follows_the_reader(
    files: list[str], size: int, shards: int, batch: int, sticks: bool, pads: bool
) -> None:
    @nvidia.dali.pipeline_def(batch_size=batch, num_threads=1, device_id=None)
    def numbers(shard: int):  # type: ignore[no-untyped-def]
        return fn.readers.numpy(
            files=files[:size],
            name="reader",
            shard_id=shard,
            num_shards=shards,
            stick_to_shard=sticks,
            pad_last_batch=pads,
        )

    for shard in range(shards):
        pipeline = numbers(shard)
        reader = Reader.from_meta(pipeline.reader_meta("reader"))
        position = ReadPosition(reader, batch)
        for _ in range(12):
            got = [int(np.asarray(row)[0]) for row in pipeline.run()[0]]
            expected = []
            for run in position.advance(np.zeros(batch, bool)).runs:
                first = size * reader.shard_at(run.epoch) // shards
                expected += range(first + run.index, first + run.index + run.count)
            assert got[: len(expected)] == expected
            copies = got[len(expected) :]
            assert pads or not copies
            assert len(set(got[-len(copies) - 1 :])) <= 1 or not expected


def test_without_a_reader_all_is_one_epoch() -> None:
    position = ReadPosition(None, 4)
    assert position.advance(np.zeros(4, bool)).runs == [Run(0, 0, 4)]
    assert position.advance(np.zeros(3, bool)).runs == [Run(0, 4, 3)]


def test_rows_that_are_dropped_do_not_count_in_their_epoch() -> None:
    position = ReadPosition(Reader(size=6, shards=1, shard=0, pads=False, sticks=False), 4)
    rows = position.advance(np.array([False, True, False, True]))
    assert (rows.runs, rows.used, rows.dropped) == ([Run(0, 0, 2)], [0, 2], 2)
    state = position.state
    for _ in range(2):
        # Two rows end the epoch, and two begin the next.
        rows = position.advance(np.array([True, False, True, False]))
        assert (rows.runs, rows.used, rows.dropped) == ([Run(0, 2, 1), Run(1, 0, 1)], [1, 3], 2)
        position.restore(state)


def test_a_bad_row_among_copies_is_no_row_dropped() -> None:
    position = ReadPosition(Reader(size=6, shards=1, shard=0, pads=True, sticks=False), 4)
    position.advance(np.zeros(4, bool))
    rows = position.advance(np.ones(4, bool))
    assert (rows.runs, rows.used, rows.dropped) == ([], [], 2)


def test_batches_are_full_without_epochs() -> None:
    emitted = EmittedEpochs(4)
    assert [emitted.next() for _ in range(3)] == [Cut(4)] * 3


def test_short_last_batches() -> None:
    emitted = EmittedEpochs(4, lambda epoch: 9 + epoch)
    assert [emitted.next().samples for _ in range(6)] == [4, 4, 1, 4, 4, 2]


def test_padded_last_batches() -> None:
    emitted = EmittedEpochs(4, lambda epoch: 3, lambda epoch: 2)
    assert [emitted.next() for _ in range(3)] == [Cut(3, 1), Cut(0, 4), Cut(3, 1)]
