from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset

from tests.train.conftest import banded
from train.data import find_shards, remote_shards, shard_set, write_shards
from train.errors import TrainError

WRITE_WITHOUT_END = """
import sys
from pathlib import Path
import numpy as np
from train.data import write_shards

class Slow(list):
    def __iter__(self):
        for _ in range(8000):
            yield np.zeros((28, 28), np.uint8)
        print("written", flush=True)
        sys.stdin.read()

write_shards(Path(sys.argv[1]), {"train": (Slow([0] * 9000), [0] * 9000)})
"""

WRITE = """
import sys
from pathlib import Path
import numpy as np
from train.data import write_shards

splits = {name: (np.zeros((400, 28, 28), np.uint8), [0] * 400) for name in ("train", "test")}
print("ready", flush=True)
sys.stdin.readline()
write_shards(Path(sys.argv[1]), splits)
"""


def splits(count: int = 30) -> dict[str, shard_set.Split]:
    return {"train": banded(count, 8), "test": banded(10, 8, colours=3)}


def test_written_shards_hold_the_images(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_set, "SAMPLES_PER_SHARD", 12)
    given = splits()
    shards = write_shards(tmp_path / "new" / "folder", given)
    assert [path.name for path in shards.train] == [f"train-000{i}.tar" for i in range(3)]
    assert [path.name for path in shards.test] == ["test-0000.tar"]
    assert shards == find_shards(tmp_path / "new" / "folder")
    for split, paths in (("train", shards.train), ("test", shards.test)):
        samples = list(webdataset.WebDataset([str(p) for p in paths], shardshuffle=False).decode("rgb8"))
        images, labels = given[split]
        assert [sample["cls"] for sample in samples] == labels.tolist()
        for sample, image in zip(samples, images, strict=True):
            expected = image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)
            np.testing.assert_array_equal(sample["png"], expected)


def test_shards_are_the_same_each_time(tmp_path):
    first, second = (write_shards(tmp_path / name, splits()) for name in "ab")
    assert first.train[0].read_bytes() == second.train[0].read_bytes()


def test_a_failure_leaves_nothing(tmp_path):
    images, labels = banded(30, 8)
    with pytest.raises(ValueError, match="shorter"):
        write_shards(tmp_path / "folder", {"train": (images, labels[:20])})
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_shards_in_the_folder(tmp_path):
    folder = tmp_path / "folder"
    process = _start(WRITE_WITHOUT_END, folder)
    assert process.stdout.readline() == b"written\n"
    assert list(tmp_path.rglob("train-0000.tar")), "it was not killed in the middle"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not folder.exists()
    assert find_shards(folder) is None
    write_shards(folder, splits())
    assert find_shards(folder) is not None


def test_two_processes_at_once_both_succeed(tmp_path):
    folder = tmp_path / "folder"
    processes = [_start(WRITE, folder) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    assert find_shards(folder) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=r"cannot write shards to .*file/folder.*--data"):
        write_shards(tmp_path / "file" / "folder", splits())


def test_other_files_are_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    with pytest.raises(TrainError, match="cannot write shards"):
        write_shards(tmp_path / "folder", splits())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["mine"]


def _start(code: str, folder: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_a_url_names_the_shards_of_both_splits():
    shards = remote_shards("http://host/c/{train-{08..10},test-{0,1}}.tar")
    assert shards.train == [f"http://host/c/train-{n}.tar" for n in ("08", "09", "10")]
    assert shards.test == ["http://host/c/test-0.tar", "http://host/c/test-1.tar"]


def test_a_url_without_test_shards_is_refused():
    with pytest.raises(TrainError, match=r"s3://b/train-\{0..2\}.tar names 3 shards train-\* and 0 shards"):
        remote_shards("s3://b/train-{0..2}.tar")
