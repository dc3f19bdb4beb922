"""The reader of WebDataset shards for use inside a pipeline definition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert

from dali_echo.graph import current_trace
from dali_echo.ranks import ranks
from dali_echo.shards import labels
from dali_echo.shards.indexing import ShardIndex, escape, shard_index
from dali_echo.shards.locating import local_paths


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
) -> Any:
    """Read WebDataset shards with `fn.readers.webdataset`, after checking what they hold.

    Index files are made and cached on first use (see `index`); after that a definition starts
    without reading the shards.

    Args:
        urls: local tars: a path or a list of paths; `{0000..1023}` expands as in a shell.
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

    Returns:
        A node if `ext` is a string, else a tuple with one per entry. Labels (extensions that
        WebDataset decodes to an integer: `cls`, `cls2`, `class`, `count`, `index`, `inx`, `id`,
        also after a dot as in `left.cls`) are int64 of shape (); all else is uint8 of shape
        (bytes,).

    Raises:
        FileNotFoundError: shards that do not exist.
        ValueError: a URL that is not local, a shard that is damaged or empty, a sample without one
            of the components, a label that is no integer, more parts than samples.
    """
    outputs = [alternatives(entry) for entry in ([ext] if isinstance(ext, str) else ext)]
    if not outputs:
        raise ValueError("ext names no component: give at least one extension, such as 'jpg'")
    shards = [shard_index(path) for path in local_paths(urls)]
    for shard in shards:
        _check(shard, outputs)
    shard_id, num_shards = _part(shard_id, num_shards, sum(shard.samples for shard in shards))
    trace = current_trace()
    if trace is not None:
        trace.rank = shard_id
    components = fn.readers.webdataset(
        name=name,
        paths=[str(shard.shard) for shard in shards],
        index_paths=[str(shard.file) for shard in shards],
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
    nodes = [components] if len(outputs) == 1 else components
    decoded = tuple(
        labels.decode(node) if _is_label(output) else node
        for node, output in zip(cast(Sequence[DataNode], nodes), outputs, strict=True)
    )
    return decoded[0] if isinstance(ext, str) else decoded


def alternatives(entry: str) -> list[str]:
    """Split an entry of `ext`, such as "jpg;.JPEG", into lower-case extensions."""
    extensions = [part.strip().removeprefix(".").lower() for part in entry.split(";")]
    if not all(extensions):
        raise ValueError(f"ext entry {entry!r}: expected an extension, or several as 'jpg;jpeg'")
    return extensions


def _is_label(output: list[str]) -> bool:
    return all(labels.is_label(extension) for extension in output)


def _check(shard: ShardIndex, outputs: list[list[str]]) -> None:
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
