from __future__ import annotations

import gzip
import hashlib
import http.server
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import webdataset

from tests.train.conftest import banded
from train.data import fashion_mnist
from train.errors import TrainError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The four files, with few images."""
    folder = tmp_path / "files"
    folder.mkdir()
    arrays = [*banded(20, 28), *banded(10, 28, seed=1)]
    for name, array in zip(fashion_mnist.CHECKSUMS, arrays, strict=True):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / name).write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))
    return folder


@pytest.fixture
def checksums(files: Path) -> dict[str, tuple[str, ...]]:
    return {
        name: ("0" * 64, hashlib.sha256((files / name).read_bytes()).hexdigest())
        for name in fashion_mnist.CHECKSUMS
    }


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the package, package tools and network."""
    monkeypatch.setattr(fashion_mnist, "INSTALLED", Path("no/such/folder"))
    monkeypatch.setenv("PATH", "")
    # Nothing listens on the reserved port 1.
    monkeypatch.setattr(fashion_mnist, "ADDRESS", "http://127.0.0.1:1")


def test_shards_hold_the_images_and_go_to_the_cache(files, checksums, cache):
    shards = fashion_mnist.prepare(files, checksums)
    assert shards.train == [cache / "fashion-mnist" / "train-0000.tar"]
    images, labels = banded(10, 28, seed=1)
    samples = list(webdataset.WebDataset(str(shards.test[0]), shardshuffle=False).decode("l8"))
    assert [sample["cls"] for sample in samples] == labels.tolist()
    np.testing.assert_array_equal([sample["png"] for sample in samples], images)
    written = shards.train[0].stat().st_mtime_ns
    assert fashion_mnist.prepare(files, checksums) == shards
    assert shards.train[0].stat().st_mtime_ns == written


def test_a_folder_of_shards_is_taken_as_it_is(tiny, no_network):
    assert fashion_mnist.prepare(tiny.train[0].parent) == tiny


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data + b"x"])
def test_a_damaged_file_is_named(files, checksums, cache, damage):
    path = files / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TrainError, match=r"t10k-images-idx3-ubyte.gz is damaged.*--data"):
        fashion_mnist.prepare(files, checksums)
    assert not cache.exists()


def test_a_missing_file_is_named(files, checksums):
    (files / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TrainError, match=r"cannot read .*train-labels-idx1-ubyte.gz"):
        fashion_mnist.prepare(files, checksums)


def test_another_folder_is_refused_and_left_alone(tmp_path, no_network):
    (tmp_path / "mine").touch()
    with pytest.raises(TrainError, match="neither shards"):
        fashion_mnist.prepare(tmp_path)
    with pytest.raises(TrainError, match="neither shards"):
        fashion_mnist.prepare(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_a_network_the_ways_out_are_told(no_network, cache):
    with pytest.raises(TrainError) as caught:
        fashion_mnist.prepare(None)
    message = str(caught.value)
    for part in ("installed: ", "debian_package: ", "published: ", "Install the", "--data"):
        assert part in message
    assert not cache.exists()


def test_the_authors_address(files, checksums, tmp_path, no_network, monkeypatch):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(files))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(fashion_mnist, "ADDRESS", address)
        shards = fashion_mnist.prepare(tmp_path / "new", checksums)
        wrong = {**checksums, "t10k-labels-idx1-ubyte.gz": ("0" * 64,)}
        with pytest.raises(TrainError, match=r"t10k-labels-idx1-ubyte.gz is damaged"):
            fashion_mnist.prepare(tmp_path / "other", wrong)
        server.shutdown()
    assert shards.train == [tmp_path / "new" / "train-0000.tar"]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("lists", ["fresh", "missing"])
def test_the_package(files, checksums, tmp_path, no_network, monkeypatch, lists):
    tools = tmp_path / "bin"
    tools.mkdir()
    # Without package lists, a download succeeds only where `update` has been told to put them.
    apt = f"""#!/bin/sh
    case "$*" in
      *Dir::State::Lists=*update) touch "${{2#Dir::State::Lists=}}/here";;
      *Dir::State::Lists=*download*) test -e "${{2#Dir::State::Lists=}}/here" && touch {DEB};;
      "download {fashion_mnist.PACKAGE}") test {lists} = fresh && touch {DEB};;
    esac || {{ echo E: Unable to locate package >&2; exit 100; }}
    """
    dpkg = f"""#!/bin/sh
    test -e "$2" && mkdir -p "$3/unpacked" && cp {files}/* "$3/unpacked"
    """
    for name, script in (("apt-get", apt), ("dpkg", dpkg)):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(fashion_mnist, "INSTALLED", Path("unpacked"))
    assert len(fashion_mnist.prepare(None, checksums).test) == 1


DEB = f"{fashion_mnist.PACKAGE}_1_all.deb"
