"""tf.data, with the echo of the paper: flat_map into repeats, then shuffle (Choi et al. 2019, section 2)."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf
from serve import BATCH, LIVE, MEAN, SIZE, STD, THREADS, serve


def records(shard: str) -> str:
    """tf.data's own format, made once beside the environment: it has no reader for tar files."""
    path = Path(os.environ["PEER_CACHE"]) / f"{Path(shard).stem}.tfrecord"
    if not path.exists():
        with tarfile.open(shard) as tar, tf.io.TFRecordWriter(f"{path}.part") as out:
            for member in tar:
                if member.name.endswith(".jpg"):
                    out.write(tar.extractfile(member).read())
        os.replace(f"{path}.part", path)
    return str(path)


def decode(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def augment(image: tf.Tensor) -> tf.Tensor:
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.slice(image, begin, size)
    image = tf.image.resize(image, [SIZE, SIZE], method="area")  # antialias=True is much slower
    image = tf.image.random_flip_left_right(image)
    return tf.transpose((image - MEAN) / STD, [2, 0, 1])


def batches(shards: list[str], factor: int) -> Iterator[np.ndarray]:
    data = tf.data.TFRecordDataset([records(shard) for shard in shards]).repeat()
    data = data.map(decode, num_parallel_calls=THREADS)
    data = data.flat_map(lambda image: tf.data.Dataset.from_tensors(image).repeat(factor))
    data = data.shuffle(LIVE)
    data = data.map(augment, num_parallel_calls=THREADS)
    data = data.batch(BATCH).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = THREADS
    return data.with_options(options).as_numpy_iterator()


if __name__ == "__main__":
    serve(batches)
