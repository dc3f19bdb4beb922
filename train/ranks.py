"""The processes that train together, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from dali_echo.ranks import ranks

TIMEOUT = timedelta(minutes=10)
"""A rank that waits for the others for so long gives up. One that dies is noticed at once."""


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the other ranks, if torchrun started this process; gives this rank's device."""
    if "RANK" not in os.environ:
        yield device
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def rank() -> int:
    """This process's number, from 0; 0 writes the files."""
    return ranks()[0]


def count() -> int:
    """How many processes train together."""
    return ranks()[1]


def total(values: list[float], device: torch.device) -> list[float]:
    """Sums over all ranks."""
    if count() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor)
    return [float(value) for value in tensor]


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in order, on every rank."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value)
    return values
