"""Real shards of real JPEGs, whose colour says which sample they are."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import webdataset

from tests.streams import SAMPLES, encode

# A change must not fail for an example that another change could have met; locally, new ones are tried.
# And no test must fail because the machine is busy.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.load_profile("ci" if "CI" in os.environ else "local")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards with the samples 0 to 249: `jpg`, and the number in ASCII as `cls`."""
    folder = tmp_path_factory.mktemp("shards")
    paths = [folder / f"train-{shard}.tar" for shard in range(3)]
    for shard, path in enumerate(paths):
        _write(path, range(shard * 100, min(SAMPLES, (shard + 1) * 100)))
    return [str(path) for path in paths]


def _write(path: Path, numbers: range) -> None:
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for number in numbers:
            tar.write({"__key__": f"{number:06}", "jpg": encode(number), "cls": str(number).encode()})
