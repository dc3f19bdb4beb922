"""Which part of the data this process reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def ranks() -> tuple[int, int]:
    """This process's rank, and how many there are, if `torch.distributed` is initialised, else 0 of 1."""
    # Looked up, not imported: nobody has initialised what is not imported yet.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def sharing() -> Callable[[Sequence[float]], list[list[float]]]:
    """A function that gives the numbers of every rank to every rank; all must make it, and call it, together.

    It has a process group of its own on the CPU, so that it does not get in the way of the trainer's.
    """
    if ranks()[1] == 1:
        return lambda values: [list(values)]
    distributed, torch = sys.modules["torch.distributed"], sys.modules["torch"]
    group = distributed.new_group(backend="gloo")

    def share(values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        all_ranks = [torch.empty_like(own) for _ in range(ranks()[1])]
        distributed.all_gather(all_ranks, own, group=group)
        return [rank.tolist() for rank in all_ranks]

    return share
