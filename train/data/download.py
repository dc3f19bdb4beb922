"""Fetching files and checking that they are the ones meant."""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
from collections.abc import Collection
from pathlib import Path

from train.errors import TrainError

TIMEOUT_S = 60.0
"""Seconds without a byte after which a download is given up."""


def check_sha256(path: Path, expected: Collection[str], remedy: str) -> None:
    """Check that a file has one of the expected SHA-256 sums, in hexadecimal.

    Raises:
        TrainError: if it has another, or cannot be read; the message ends in `remedy`.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror}. {remedy}") from error
    if digest.hexdigest() not in expected:
        raise TrainError(
            f"{path} is damaged, incomplete or another file: its SHA-256 is {digest.hexdigest()}, "
            f"not {' or '.join(sorted(expected))}. {remedy}"
        )


def fetch(url: str, path: Path) -> None:
    """Download a file.

    Raises:
        OSError: if the address does not answer or the connection breaks.
    """
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)
