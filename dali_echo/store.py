"""The tensors of the live items, and the bytes they hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nvidia.dali import types
from nvidia.dali.backend import TensorListCPU, TensorListGPU

Sample = tuple[Any, ...]
"""One row: a DALI tensor for each node of a mark."""


@dataclass
class _Memory:
    """Memory that is free again when none of its items is live."""

    bytes: int
    items: int


class Store:
    """The rows of live items, by the items' ordinals.

    Args:
        by_sample: an item is one row, and not all rows of an upstream batch.
        own_memory: give every item memory of its own, by a copy. The samples of a DALI batch otherwise
            share the batch's, which is held until the last of them goes.
    """

    def __init__(self, by_sample: bool, own_memory: bool) -> None:
        self._by_sample = by_sample
        self._own_memory = own_memory
        self._items: dict[int, tuple[Sequence[Sample], _Memory]] = {}
        self.samples = 0
        self.bytes = 0

    def add(
        self,
        first_item: int,
        outputs: Sequence[Any],
        rows: Sequence[int],
        size: int,
        wanted: Collection[int] | None = None,
    ) -> int:
        """Hold `rows` of an upstream batch, and number its items from `first_item`.

        Args:
            first_item: ordinal of the batch's first item.
            outputs: a tensor list for each node.
            rows: the ones that are fresh and good.
            size: `batch_bytes` of the outputs.
            wanted: the items to hold; the others are passed over.

        Returns:
            How many items the batch has.
        """
        # By index, since a slice of a tensor list crashes the interpreter.
        samples = list(zip(*([output[i] for i in rows] for output in outputs), strict=True))
        items: list[Sequence[Sample]] = [[s] for s in samples] if self._by_sample else [samples]
        if not samples:
            return 0
        kept = [i for i in range(len(items)) if wanted is None or first_item + i in wanted]
        if kept and not self._own_memory:
            shared = _Memory(size, len(kept))
            self.bytes += shared.bytes
        for i in kept:
            if self._own_memory:
                items[i] = [_copy(sample) for sample in items[i]]
                memory = _Memory(sum(_tensor_bytes(t) for sample in items[i] for t in sample), 1)
                self.bytes += memory.bytes
            else:
                memory = shared
            self._items[first_item + i] = items[i], memory
            self.samples += len(items[i])
        return len(items)

    def rows(self, items: Iterable[int]) -> list[Sample]:
        """The rows of items that are held, one after the other."""
        held = self._items
        return [sample for item in items for sample in held[item][0]]

    def bytes_of(self, items: Iterable[int]) -> int:
        """Bytes of the memory that items hold: exact if each has its own, else at least theirs."""
        return sum({id(m): m.bytes for m in (self._items[item][1] for item in items)}.values())

    def remove(self, items: Iterable[int]) -> None:
        """Let go of items."""
        for item in items:
            rows, memory = self._items.pop(item)
            self.samples -= len(rows)
            memory.items -= 1
            if not memory.items:
                self.bytes -= memory.bytes

    def keep(self, items: Collection[int]) -> None:
        """Let go of all but these items."""
        self.remove(self._items.keys() - items)


def batch_bytes(outputs: Sequence[Any]) -> int:
    """Bytes of the values of tensor lists."""
    return sum(sum(map(math.prod, output.shape())) * _item_size(output) for output in outputs)


def tensor_list(tensors: Sequence[Any], *, contiguous: bool) -> Any:
    """A DALI batch of these tensors, without a copy of them if it need not be contiguous."""
    on_gpu = hasattr(tensors[0], "device_id")
    return (TensorListGPU if on_gpu else TensorListCPU)(list(tensors), contiguous=contiguous)


def _tensor_bytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape())) * _item_size(tensor)


def _item_size(tensor: Any) -> int:
    return int(np.dtype(types.to_numpy_type(tensor.dtype)).itemsize)


def _copy(sample: Sample) -> Sample:
    return tuple(tensor_list([tensor], contiguous=True)[0] for tensor in sample)
