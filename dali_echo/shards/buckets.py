"""Shards in S3 and Google Cloud Storage, which DALI reads itself."""

from __future__ import annotations

from collections.abc import Sequence

from nvidia.dali import Pipeline, fn

from dali_echo.shards import summary
from dali_echo.shards.indexing import ShardIndex

SCHEMES = ("s3://", "gs://")


def find(urls: Sequence[str]) -> list[ShardIndex]:
    """Read the index beside each shard, with DALI, which knows the credentials.

    Raises:
        OSError: an index that cannot be read: its URL, and what DALI says.
        ValueError: one that is no whole index of ours.
    """
    files = [f"{url}.idx" for url in urls]
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(fn.readers.file(files=files)[0])
    return [_index(url, file, pipeline) for url, file in zip(urls, files, strict=True)]


def _index(url: str, file: str, pipeline: Pipeline) -> ShardIndex:
    remedy = (
        f"make it with `dali-echo shards index` where the shard is a local file, and put it there as {file}"
    )
    try:
        content = pipeline.run()[0].at(0).tobytes()
    except RuntimeError as error:
        said = str(error).partition("encountered:")[2].strip().partition("\n")[0]
        raise OSError(
            f"{url}: DALI cannot read an index beside the shards ({said or error}): check the credentials; "
            f"if there is none, {remedy}"
        ) from None
    line, _, rest = content.partition(b"\n")
    known = summary.parse(line.decode("latin-1"))
    if known is None or known.index_bytes != len(rest):
        raise ValueError(f"{file}: no whole index that dali_echo has written: {remedy}")
    return ShardIndex(url, file, known.samples, known.layouts, known.not_integer)
