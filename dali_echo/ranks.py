"""Which part of the data this process reads."""

from __future__ import annotations

import sys


def ranks() -> tuple[int, int]:
    """This process's rank, and how many there are, if `torch.distributed` is initialised, else 0 of 1."""
    # Looked up, not imported: nobody has initialised what is not imported yet.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
