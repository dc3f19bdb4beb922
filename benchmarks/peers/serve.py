"""What the peers' scripts share: talking with peers.py, reading JPEGs, and the echo that one writes by hand.

Standard library only, since each peer has an environment of its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BATCH = 64
SIZE = 224
LIVE = 256
"""Uses that wait in the shuffle buffer after the echo."""
THREADS = 2
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


def encoded(shards: list[str]) -> Iterator[bytes]:
    """The JPEGs of the shards, in order and without end."""
    for shard in itertools.cycle(shards):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    yield tar.extractfile(member).read()


def echoed(samples: Iterable[Any], factor: int, live: int = LIVE) -> Iterator[Any]:
    """Each sample `factor` times, shuffled: references go through a buffer, not copies."""
    uses: list[Any] = []
    for sample in samples:
        for _ in range(factor):
            uses.append(sample)
            if len(uses) > live:
                i = random.randrange(len(uses))
                uses[i], uses[-1] = uses[-1], uses[i]
                yield uses.pop()


def serve(batches: Callable[[list[str], int], Iterable[Any]]) -> None:
    """Run `batches(shards, factor)`, an endless stream, as the driver asks on standard input."""
    shards = sys.argv[1:]
    for line in sys.stdin:
        request = json.loads(line)
        stream = iter(batches(shards, request["factor"]))
        for _ in range(2 * LIVE // BATCH + 8):
            next(stream)  # the buffer fills
        print("ready", flush=True)
        sys.stdin.readline()
        images, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < request["seconds"]:
            for _ in range(8):  # whole numbers of upstream batches
                next(stream)
            images += 8 * BATCH
        print(json.dumps({"images": images, "seconds": seconds}), flush=True)
        del stream
        gc.collect()
