"""torchdata.nodes with torchvision's operators on uint8 tensors, in threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torchdata.nodes as nodes
from serve import BATCH, MEAN, SIZE, STD, THREADS, echoed, encoded, serve
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2


def decode(jpeg: bytes) -> torch.Tensor:
    return decode_image(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), ImageReadMode.RGB)


class Echo(nodes.BaseNode):
    """The echo one writes by hand."""

    def __init__(self, source: nodes.BaseNode, factor: int) -> None:
        super().__init__()
        self._source, self._factor = source, factor

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._source.reset()
        self._uses = echoed(self._source, self._factor)

    def next(self) -> torch.Tensor:
        return next(self._uses)

    def get_state(self) -> dict[str, Any]:
        return {}


def batches(shards: list[str], factor: int) -> Iterator[torch.Tensor]:
    torch.set_num_threads(1)
    augment = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32),
            v2.Normalize(MEAN, STD),
        ]
    )
    node = nodes.IterableWrapper(encoded(shards))
    node = nodes.ParallelMapper(node, decode, num_workers=THREADS, method="thread")
    node = Echo(node, factor)
    node = nodes.ParallelMapper(node, augment, num_workers=THREADS, method="thread")
    node = nodes.Mapper(nodes.Batcher(node, BATCH), torch.stack)
    return iter(nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2)))


if __name__ == "__main__":
    serve(batches)
