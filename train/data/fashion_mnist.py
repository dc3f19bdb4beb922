"""Fashion-MNIST: 60,000 training and 10,000 test images, 28 × 28 grey, of ten kinds of clothing.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms", arXiv 1708.07747. MIT licence.
"""

from __future__ import annotations

import gzip
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from rich.console import Console

from train.data.download import check_sha256, fetch
from train.data.shard_set import ShardSet, Split, cache_folder, find_shards, write_shards
from train.errors import TrainError

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("usr/share/datasets/fashion-mnist")
ADDRESS = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"

# Of each file, first as its authors publish it, then as Debian has compressed it anew.
CHECKSUMS: dict[str, tuple[str, ...]] = {
    "train-images-idx3-ubyte.gz": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    ),
    "train-labels-idx1-ubyte.gz": (
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    ),
    "t10k-images-idx3-ubyte.gz": (
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    ),
}

BY_HAND = (
    f"Install the Debian or Ubuntu package {PACKAGE}, or download the four files "
    f"{', '.join(CHECKSUMS)} from {ADDRESS} into one folder and name it with --data"
)


def prepare(data: Path | None, checksums: Mapping[str, Collection[str]] = CHECKSUMS) -> ShardSet:
    """Shards of Fashion-MNIST, made on first use.

    Args:
        data: a folder with shards, or with the four files as published, whose shards go to the
            cache; or one that is new or empty, for shards of downloaded data. None: the cache.
        checksums: SHA-256 of each file to accept.

    Raises:
        TrainError: if there is no data to be had, it is not what it should be, or the shards
            cannot be written.
    """
    folder = data or cache_folder("fashion-mnist")
    if shards := find_shards(folder):
        return shards
    if data and any((data / name).exists() for name in checksums):
        check(data, checksums)
        cached = cache_folder("fashion-mnist")
        return find_shards(cached) or write_shards(cached, load(data))
    if data and data.exists() and not (data.is_dir() and not any(data.iterdir())):
        raise TrainError(
            f"--data {data} has neither shards train-*.tar and test-*.tar nor the four files of "
            f"Fashion-MNIST: name a folder that has, or one that is new or empty to download to"
        )
    with tempfile.TemporaryDirectory() as temporary:
        files = obtain(Path(temporary))
        check(files, checksums)
        return write_shards(folder, load(files))


def obtain(temporary: Path) -> Path:
    """A folder with the four files: installed, else from the package, else from the authors.

    Args:
        temporary: a folder for what has to be fetched.

    Raises:
        TrainError: if all of them fail; the message tells how each did.
    """
    failures = []
    for source in (installed, debian_package, published):
        try:
            return source(temporary)
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{source.__name__}: {error}")
    raise TrainError(f"cannot get Fashion-MNIST ({'; '.join(failures)}). {BY_HAND}")


def installed(_temporary: Path) -> Path:
    """Where the package puts the files."""
    folder = Path("/") / INSTALLED
    if not folder.is_dir():
        raise FileNotFoundError(f"no {folder}")
    return folder


def debian_package(temporary: Path) -> Path:
    """Download the package and unpack it, which needs no root and installs nothing."""
    say(f"Downloading the package {PACKAGE} …")
    state, cache = temporary / "lists", temporary / "cache"
    (state / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    private = ["-o", f"Dir::State::Lists={state}", "-o", f"Dir::Cache={cache}"]
    try:
        _run(["apt-get", "download", PACKAGE], temporary)
    except subprocess.SubprocessError:
        # A machine that has never fetched the package lists, or long ago.
        _run(["apt-get", *private, "update"], temporary)
        _run(["apt-get", *private, "download", PACKAGE], temporary)
    (archive,) = temporary.glob(f"{PACKAGE}_*.deb")
    _run(["dpkg", "-x", str(archive), str(temporary)], temporary)
    return temporary / INSTALLED


def published(temporary: Path) -> Path:
    """Download the four files from where their authors publish them."""
    for name in CHECKSUMS:
        say(f"Downloading {ADDRESS}/{name} …")
        fetch(f"{ADDRESS}/{name}", temporary / name)
    return temporary


def check(folder: Path, checksums: Mapping[str, Collection[str]]) -> None:
    """Check that the files are complete and the ones meant.

    Raises:
        TrainError: if one is not.
    """
    for name, expected in checksums.items():
        check_sha256(folder / name, expected, BY_HAND)


def load(folder: Path) -> dict[str, Split]:
    """The two splits from the four files."""
    arrays = [_read_idx(folder / name) for name in CHECKSUMS]
    return {"train": (arrays[0], arrays[1]), "test": (arrays[2], arrays[3])}


def say(text: str) -> None:
    """Tell what takes a while, apart from the results."""
    Console(stderr=True).print(text, highlight=False)


def _read_idx(path: Path) -> np.ndarray:
    """IDX: two zero bytes, the type (8: uint8), the number of axes, their sizes, the values."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">u4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise subprocess.SubprocessError(f"{' '.join(command[:1])}: {last}")
