import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Members = Iterable[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and the folder that index files go to."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "dali_echo" / "index"


@pytest.fixture
def write_tar(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, members: Members, format: int = tarfile.GNU_FORMAT) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w", format=format) as tar:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture(scope="session")
def jpeg() -> Callable[[int], bytes]:
    """Make a JPEG whose colour tells which one it is: see `identify`."""

    def make(number: int) -> bytes:
        file = io.BytesIO()
        colour = (number % 16 * 16 + 8, number // 16 % 16 * 16 + 8, 128)
        Image.new("RGB", (24, 16 + number % 5), colour).save(file, "JPEG", quality=95)
        return file.getvalue()

    return make


@pytest.fixture(scope="session")
def identify() -> Callable[[np.ndarray], int]:
    def number(image: np.ndarray) -> int:
        red, green, _ = image.reshape(-1, 3).mean(axis=0)
        return int(red) // 16 + int(green) // 16 * 16

    return number
