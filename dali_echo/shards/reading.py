"""The reader of WebDataset shards for use inside a pipeline definition."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline, do_not_convert
from nvidia.dali.types import BatchInfo, DALIDataType

from dali_echo.epochs import Reader, ceil_div
from dali_echo.graph import current_trace
from dali_echo.ranks import ranks
from dali_echo.shards import buckets, labels, remote
from dali_echo.shards.decoding import is_image
from dali_echo.shards.guarding import Guard
from dali_echo.shards.indexing import ShardIndex, escape, shard_index
from dali_echo.shards.locating import expand, is_remote, local_paths
from dali_echo.shards.order import Order
from dali_echo.shards.patience import Patience
from dali_echo.shards.remote import RemoteShard
from dali_echo.shards.skipped import SkippedLog
from dali_echo.shards.streaming import Stream
from dali_echo.streamed import StreamedPipeline

OnError = Literal["raise", "skip"]


@do_not_convert  # type: ignore[untyped-decorator]
def read(
    urls: str | Path | Iterable[str | Path],
    ext: str | Sequence[str],
    *,
    name: str,
    shuffle: bool = True,
    initial_fill: int = 1024,
    shard_id: int | None = None,
    num_shards: int | None = None,
    pad_last_batch: bool = False,
    stick_to_shard: bool = False,
    on_error: OnError = "raise",
    max_errors: float | None = None,
    error_log: str | Path | None = "skipped.jsonl",
    timeout: float = 60.0,
    retries: int = 5,
    streams: int = 4,
    allow_pipe: bool = False,
) -> Any:
    """Read WebDataset shards after checking what they hold.

    Local ones and those in buckets are read by `fn.readers.webdataset`, those at other URLs are
    streamed into an external source, with the same guarantees. Index files are made and cached on
    first use (see `index`); after that a definition starts without reading the shards. In buckets
    they must be there already.

    Args:
        urls: tars: a path, a URL (`http(s)://`, `hf://`, `pipe:`, `s3://`, `gs://`), a pattern with
            braces as in a shell (`{0000..1023}`), a glob, a text file (`*.txt`) of these, one per line,
            or a list of any of them.
        ext: the component, or list of components, to read: `"jpg"`, or alternatives
            `"jpg;jpeg;png"`. The extension of a file starts at the first dot of its name, and
            upper and lower case are the same, as in WebDataset.
        name: the reader's name, for `reader_name` of an iterator.
        shuffle: draw samples from a window of `initial_fill`, and read the shards in another
            order in each epoch. The window's draws follow the pipeline's seed; the order of shards
            is the same in every run, so that ranks with different seeds still agree on it.
        initial_fill: samples in the window, held encoded.
        shard_id: which part of the samples to read, from 0.
        num_shards: how many parts there are. Without both, the rank and the world size of
            `torch.distributed` when it is initialised, else everything.
        pad_last_batch: repeat the last sample so that all parts have the same number of batches.
        stick_to_shard: read the same part in each epoch. The order of shards is then fixed.
        on_error: what becomes of a sample with an image (a component with an image's extension) that
            does not decode: "raise" ends the run, and names shard, sample and reason; "skip" leaves the
            sample out, at the first `echo` mark, and the run goes on with the next ones.
        max_errors: for "skip", how many samples each rank leaves out at most: an integer counts different
            ones since the process began; a number between 0 and 1 is the fraction of the samples read (of
            1,000 at least). By default 0.05. More than 100 in a row, or a larger integer `max_errors`, are
            an error too.
        error_log: for "skip", a file to which a line of JSON with `shard`, `key` and `reason` is appended
            for each sample left out that it does not name yet; ranks may share it. None for no file.
        timeout: of streams: seconds in which no byte comes, over all tries, after which they fail.
        retries: of streams: tries after one that failed, until a byte comes. The wait between them doubles
            from half a second on.
        streams: shards that are streamed at a time.
        allow_pipe: whether `pipe:COMMAND` may run COMMAND in a shell, for the shard that it prints.

    Returns:
        A node if `ext` is a string, else a tuple with one per entry. Labels (extensions that
        WebDataset decodes to an integer: `cls`, `cls2`, `class`, `count`, `index`, `inx`, `id`,
        also after a dot as in `left.cls`) are int64 of shape (); all else is uint8 of shape
        (bytes,).

    Raises:
        FileNotFoundError: shards that do not exist.
        OSError: `error_log` cannot be written; a shard that a server does not send, here or while the
            pipeline runs. The message holds URL and cause.
        ValueError: shards of several kinds in one call, a URL of no known kind, a `pipe:` that is not
            allowed, a shard that is damaged or empty, a sample without one of the components, a label that
            is no integer, more parts than samples, an argument that cannot be; when it runs, an image that
            does not decode, or too many of them.
    """
    outputs = [alternatives(entry) for entry in ([ext] if isinstance(ext, str) else ext)]
    if not outputs:
        raise ValueError("ext names no component: give at least one extension, such as 'jpg'")
    guard = _guard(on_error, max_errors, error_log)
    screened = [place for place, output in enumerate(outputs) if all(map(is_image, output))]
    if guard.skips and not screened:
        raise ValueError(
            f'on_error="skip" leaves out samples whose image does not decode, and no entry of ext = {ext!r} '
            f"has an image's extension, such as 'jpg'"
        )
    if streams < 1:
        raise ValueError(f"streams = {streams} must be at least 1")
    names = expand(urls)
    in_buckets = [name for name in names if name.startswith(buckets.SCHEMES)]
    streamed = [name for name in names if is_remote(name) and name not in set(in_buckets)]
    if len(names) not in (len(streamed), len(in_buckets), len(names) - len(streamed) - len(in_buckets)):
        raise ValueError(
            f"{remote.shown((streamed or in_buckets)[0])!r} with shards elsewhere: one call reads either "
            "local shards, or s3:// and gs://, or other URLs"
        )
    found: list[RemoteShard] = []
    shards: Sequence[ShardIndex | RemoteShard]
    if streamed:
        shards = found = remote.find(names, Patience(timeout, retries), allow_pipe)
    elif in_buckets:
        shards = buckets.find(names)
    else:
        shards = [shard_index(path) for path in local_paths(names)]
    for shard in shards:
        _check(shard, outputs)
    samples = sum(shard.samples for shard in shards)
    shard_id, num_shards = _part(shard_id, num_shards, samples)
    trace = current_trace()
    if trace is not None:
        trace.rank = shard_id
    elif guard.skips:
        raise ValueError(
            'on_error="skip" needs `dali_echo.pipeline_def` instead of `nvidia.dali.pipeline_def`'
        )
    counts = [shard.samples for shard in shards]
    # Another list of shards of the same size would be another stream; where they lie does not matter.
    vars(Pipeline.current()).setdefault("_dali_echo_shards", {})[name] = (
        f"{len(counts)} (sizes {hashlib.sha256(repr(counts).encode()).hexdigest()[:8]}), shuffle={shuffle}, "
        f"initial_fill={initial_fill}" + (f", streams={streams}" if streamed else "")
    )
    if streamed:
        order = Order(
            counts=counts,
            reader=Reader(samples, num_shards, shard_id, pads=pad_last_batch, sticks=stick_to_shard),
            batch_size=Pipeline.current().max_batch_size,
            lanes=streams,
            window=initial_fill if shuffle else 0,
            seed=Pipeline.current().seed or 0,
        )
        stream = Stream(found, outputs, order, timeout, retries)
        nodes, origins = _stream(name, stream, order.reader, len(outputs))
    else:
        components = fn.readers.webdataset(
            name=name,
            paths=[str(shard.shard) for shard in shards],
            index_paths=[str(shard.file) for shard in cast(Sequence[ShardIndex], shards)],
            ext=[";".join(escape(extension) for extension in output) for output in outputs],
            case_sensitive_extensions=False,
            missing_component_behavior="error",
            random_shuffle=shuffle,
            initial_fill=initial_fill,
            # DALI refuses both together.
            shuffle_after_epoch=shuffle and not stick_to_shard,
            stick_to_shard=stick_to_shard,
            shard_id=shard_id,
            num_shards=num_shards,
            pad_last_batch=pad_last_batch,
        )
        nodes = [components] if len(outputs) == 1 else list(components)
        origins = [fn.get_property(node, key="source_info") for node in nodes]
    if screened and trace is not None:
        images, bad = guard.behind(
            [nodes[place] for place in screened], [origins[place] for place in screened]
        )
        for place, image in zip(screened, images, strict=True):
            nodes[place] = image
        trace.guard(guard, bad)
    decoded = tuple(
        labels.decode(node) if _is_label(output) else node
        for node, output in zip(nodes, outputs, strict=True)
    )
    return decoded[0] if isinstance(ext, str) else decoded


def _stream(name: str, stream: Stream, reader: Reader, outputs: int) -> tuple[list[DataNode], list[DataNode]]:
    """The components, and where each comes from, as external sources, with the meta data of a reader."""
    meta = {
        "epoch_size": reader.size,
        "epoch_size_padded": ceil_div(reader.size, reader.shards) * reader.shards,
        "number_of_shards": reader.shards,
        "shard_id": reader.shard,
        "pad_last_batch": int(reader.pads),
        "stick_to_shard": int(reader.sticks),
    }
    StreamedPipeline.add(name, meta, stream.close)
    nodes = [
        fn.external_source(
            source=_source(stream, output),
            batch_info=True,
            dtype=DALIDataType.UINT8,
            ndim=1,
            name=f"{name}[{output}]",
        )
        for output in range(2 * outputs)
    ]
    return nodes[:outputs], nodes[outputs:]


def _source(stream: Stream, output: int) -> Callable[[BatchInfo], Any]:
    # DALI looks at the arguments of what it calls, and does not see through a `partial`.
    def source(info: BatchInfo) -> Any:
        return stream.feed(output, info)

    return source


def alternatives(entry: str) -> list[str]:
    """Split an entry of `ext`, such as "jpg;.JPEG", into lower-case extensions."""
    extensions = [part.strip().removeprefix(".").lower() for part in entry.split(";")]
    if not all(extensions):
        raise ValueError(f"ext entry {entry!r}: expected an extension, or several as 'jpg;jpeg'")
    return extensions


def _guard(on_error: Any, max_errors: Any, error_log: Any) -> Guard:
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error = {on_error!r} is not known; use "raise" or "skip"')
    if on_error == "raise":
        if max_errors is not None:
            raise ValueError(
                f'max_errors = {max_errors!r} allows errors, and on_error="raise" none: use "skip"'
            )
        return Guard(None, 0)
    if max_errors is None:
        max_errors = 0.05
    if (
        isinstance(max_errors, bool)
        or not (isinstance(max_errors, int) or 0 < max_errors < 1)
        or max_errors < 0
    ):
        raise ValueError(
            f"max_errors = {max_errors!r} must be a number of samples, as an integer, or a fraction of those "
            f"read, between 0 and 1"
        )
    return Guard(SkippedLog(None if error_log is None else Path(error_log)), max_errors)


def _is_label(output: list[str]) -> bool:
    return all(labels.is_label(extension) for extension in output)


def _check(shard: ShardIndex | RemoteShard, outputs: list[list[str]]) -> None:
    for output in outputs:
        for present, key in shard.layouts:
            if not set(output) & set(present):
                raise ValueError(
                    f"{shard.shard}: sample {key!r} has no component {' or '.join(output)!r}; it "
                    f"has {', '.join(map(repr, present))}. Name one of these in ext, as "
                    "alternatives if samples differ ('jpg;jpeg'), or leave the sample out. An "
                    "extension starts at the first dot of the file's name"
                )
        odd = [extension for extension in output if extension in shard.not_integer]
        if odd and _is_label(output):
            key, text = shard.not_integer[odd[0]]
            raise ValueError(
                f"{shard.shard}: sample {key!r} has the text {text!a} in its label {odd[0]!r}, "
                "which is no int64 number. Write a number there, or give the component an "
                "extension that is not a label's, such as 'txt', to read it as bytes"
            )


def _part(shard_id: int | None, num_shards: int | None, samples: int) -> tuple[int, int]:
    if shard_id is None and num_shards is None:
        shard_id, num_shards = ranks()
    if shard_id is None or num_shards is None or not 0 <= shard_id < num_shards:
        raise ValueError(
            f"shard_id={shard_id} and num_shards={num_shards}: give both, with "
            "0 <= shard_id < num_shards, or neither"
        )
    if num_shards > samples:
        raise ValueError(
            f"{num_shards} ranks (num_shards) cannot share {samples} sample(s): "
            f"start at most {samples} rank(s), or read more shards"
        )
    return shard_id, num_shards
