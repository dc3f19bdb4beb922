from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from tests.train.conftest import banded
from train.data import cifar10
from train.errors import TrainError

MEMBERS = [member for members in cifar10.MEMBERS.values() for member in members]


def batch(seed: int) -> dict[bytes, Any]:
    """As Python 2 has pickled them: keys are bytes, and pixels lie plane by plane."""
    images, labels = banded(6, 32, colours=3, seed=seed)
    data = images.transpose(0, 3, 1, 2).reshape(6, -1)
    return {b"batch_label": b"", b"labels": labels.tolist(), b"data": np.ascontiguousarray(data)}


class Python2Pickler(pickle._Pickler):
    """Writes bytes and text alike, as the one string type that Python 2 had."""

    def save_string(self, value: bytes | str) -> None:
        data = value.encode("latin-1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_string, str: save_string}  # noqa: RUF012


def python2_pickle(content: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue()


def write_archive(path: Path, batches: dict[str, Any]) -> tuple[str]:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in batches.items():
            # The name that NumPy 1 had for its module.
            data = python2_pickle(content).replace(b"numpy._core.", b"numpy.core.")
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return (hashlib.sha256(path.read_bytes()).hexdigest(),)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / cifar10.ARCHIVE


@pytest.mark.parametrize("named", ["file", "folder"])
def test_shards_of_the_archive(archive, cache, named):
    checksums = write_archive(archive, {name: batch(i) for i, name in enumerate(MEMBERS)})
    shards = cifar10.prepare(archive if named == "file" else archive.parent, checksums)
    assert shards.train == [cache / "cifar10" / "train-0000.tar"]
    for paths, seeds in ((shards.train, range(5)), (shards.test, [5])):
        samples = list(webdataset.WebDataset(str(paths[0]), shardshuffle=False).decode("rgb8"))
        expected = [banded(6, 32, colours=3, seed=seed) for seed in seeds]
        assert [s["cls"] for s in samples] == np.concatenate([e[1] for e in expected]).tolist()
        np.testing.assert_array_equal([s["png"] for s in samples], np.concatenate([e[0] for e in expected]))


def test_a_folder_of_shards_is_taken_as_it_is(tiny):
    assert cifar10.prepare(tiny.train[0].parent) == tiny


def test_another_archive_is_refused(archive, cache):
    write_archive(archive, {})
    with pytest.raises(TrainError, match=r"cifar-10-python.tar.gz is damaged.*Download"):
        cifar10.prepare(archive)
    assert not cache.exists()


def test_an_archive_without_a_batch_is_refused(archive, cache):
    checksums = write_archive(archive, {name: batch(0) for name in MEMBERS[:-1]})
    with pytest.raises(TrainError, match=r"no archive of CIFAR-10.*test_batch"):
        cifar10.prepare(archive, checksums)
    assert not cache.exists()


def test_a_file_that_is_no_archive_is_refused(archive):
    archive.write_bytes(b"<html>not found</html>")
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(TrainError, match=r"no archive of CIFAR-10"):
        cifar10.prepare(archive, (checksum,))


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_pickle_runs_nothing(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checksums = write_archive(archive, {name: Evil() for name in MEMBERS})
    with pytest.raises(TrainError, match=r"it would run .*system"):
        cifar10.prepare(archive, checksums)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [None, "missing"])
def test_without_data_the_ways_to_get_it_are_told(tmp_path, data):
    with pytest.raises(TrainError, match=r"--data.*Download https://.*cifar-10-python.tar.gz"):
        cifar10.prepare(data and tmp_path / data)
