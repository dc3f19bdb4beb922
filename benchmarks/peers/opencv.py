"""A thread pool around OpenCV, which lets go of the interpreter's lock while it works."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import cv2
import numpy as np
from serve import BATCH, MEAN, SIZE, STD, THREADS, echoed, encoded, serve

SCALE = (1 / np.float32(STD))[:, None, None]
SHIFT = (np.float32(MEAN) / np.float32(STD))[:, None, None]


def decode(jpeg: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)


def window(height: int, width: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def augment(image: np.ndarray, out: np.ndarray) -> None:
    y, x, h, w = window(*image.shape[:2])
    view = cv2.resize(image[y : y + h, x : x + w], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
    if random.random() < 0.5:
        view = cv2.flip(view, 1)
    np.multiply(view.transpose(2, 0, 1), SCALE, out=out)
    np.subtract(out, SHIFT, out=out)


def ahead(pool: ThreadPoolExecutor, jpegs: Iterator[bytes]) -> Iterator[np.ndarray]:
    waiting: list[Future] = []
    for jpeg in jpegs:
        waiting.append(pool.submit(decode, jpeg))
        if len(waiting) > BATCH:
            yield waiting.pop(0).result()


def batches(shards: list[str], factor: int) -> Iterator[np.ndarray]:
    cv2.setNumThreads(1)
    with ThreadPoolExecutor(THREADS) as pool:
        images = echoed(ahead(pool, encoded(shards)), factor)
        pending: list[tuple[np.ndarray, list[Future]]] = []
        while True:
            batch = np.empty((BATCH, 3, SIZE, SIZE), np.float32)
            pending.append((batch, [pool.submit(augment, next(images), out) for out in batch]))
            if len(pending) > 2:  # two batches are made while one is used
                batch, parts = pending.pop(0)
                for part in parts:
                    part.result()
                yield batch


if __name__ == "__main__":
    serve(batches)
