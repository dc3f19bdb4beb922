import json
import logging
import threading

import pytest

from dali_echo.shards.skipped import SkippedLog


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_sample_once(tmp_path, caplog):
    path = tmp_path / "skipped.jsonl"
    log = SkippedLog(path)
    assert not path.exists()
    with caplog.at_level(logging.WARNING, "dali_echo"):
        for _ in range(2):
            log.add("a.tar", "1", "truncated")
            log.add("b.tar", "1", "no bytes")
    assert entries(path) == [
        {"shard": "a.tar", "key": "1", "reason": "truncated"},
        {"shard": "b.tar", "key": "1", "reason": "no bytes"},
    ]
    assert caplog.messages[0] == "left out: a.tar: sample '1': truncated"
    assert len(caplog.records) == 2


def test_a_file_that_is_there_is_gone_on_with(tmp_path, caplog):
    path = tmp_path / "skipped.jsonl"
    SkippedLog(path).add("a.tar", "1", "truncated")
    path.write_bytes(path.read_bytes() + b'{"shard": "a.t')  # the process died
    again = SkippedLog(path)
    again.add("a.tar", "1", "truncated")
    again.add("a.tar", "2", "ümlaut\nand line")
    assert [entry["key"] for entry in entries(path)] == ["1", "2"]


def test_without_a_file_there_is_still_the_log(caplog):
    log = SkippedLog(None)
    for _ in range(2):
        log.add("a.tar", "1", "truncated")
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="error_log = .*cannot be written: name a file in a folder"):
        SkippedLog(tmp_path / "missing" / "skipped.jsonl")


def _write(path, first, barrier):
    log = SkippedLog(path)
    barrier.wait()
    for number in range(first, first + 300):
        log.add("a.tar", str(number), "x" * (number % 7 * 2000))


def test_ranks_share_a_file_and_no_line_is_lost_doubled_or_torn(tmp_path):
    # The lock is on the open file, so that threads stand for processes.
    path = tmp_path / "skipped.jsonl"
    barrier = threading.Barrier(3)
    ranks = [threading.Thread(target=_write, args=(path, 100 * n, barrier)) for n in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert sorted(int(entry["key"]) for entry in entries(path)) == list(range(500))
