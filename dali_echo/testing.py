"""Checks that users can run on their own pipelines."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from dali_echo.pytorch import Batch, EchoIterator


def assert_resumes_exactly(make_iterator: Callable[[], EchoIterator], steps: int) -> None:
    """Check that an iterator resumes bit for bit from a state saved after any of `steps` batches.

    Runs once through `steps` batches, over as many epochs as that takes, and saves the state before the
    first and after each one. Then restores every state in a fresh iterator and compares all that follows,
    the ends of epochs included. States go through `torch.save` and `torch.load(weights_only=True)`.

    Args:
        make_iterator: makes the iterator anew, always with the same arguments and seeds, on a pipeline
            with `enable_checkpointing=True`.
        steps: batches, at least 1. Takes about steps² / 2 batches of work.

    Raises:
        AssertionError: naming the step saved at, the step that differs, and the output.
    """
    if steps < 1:
        raise ValueError(f"steps = {steps} must be at least 1")
    iterator = make_iterator()
    states = [_stored(iterator.state_dict())]
    batches: list[Batch] = []
    ends: list[int] = []
    while len(batches) < steps:
        batch = _next(iterator)
        if batch is None:
            ends.append(len(batches))
        else:
            batches.append(batch)
            states.append(_stored(iterator.state_dict()))
    for saved, state in enumerate(states):
        if state.keys() != states[0].keys():
            raise AssertionError(f"the state after step {saved} has other keys: {sorted(state)}")
        resumed = make_iterator()
        resumed.load_state_dict(state)
        again = _stored(resumed.state_dict())
        if again != state:
            raise AssertionError(f"the state after step {saved} changes by being restored")
        _compare(resumed, batches, ends, saved)


def _compare(resumed: EchoIterator, batches: list[Batch], ends: list[int], saved: int) -> None:
    # The end of an epoch comes after the state of its last batch.
    expected_ends = [end for end in ends if end >= saved]
    step, got_ends = saved, []
    while step < len(batches):
        batch = _next(resumed)
        if batch is None:
            got_ends.append(step)
            continue
        for name, expected in batches[step].items():
            if not _same(batch.get(name), expected):
                raise AssertionError(
                    f"resumed after step {saved}, the batch of step {step} differs in {name!r}"
                )
        step += 1
    if got_ends != expected_ends:
        raise AssertionError(
            f"resumed after step {saved}, epochs end after steps {got_ends}, not {expected_ends}"
        )


def _next(iterator: EchoIterator) -> Batch | None:
    """The next batch, copied, since its tensors alias DALI's; None at the end of an epoch."""
    try:
        return {name: tensor.clone() for name, tensor in next(iterator).items()}
    except StopIteration:
        return None


def _same(got: Any, expected: torch.Tensor) -> bool:
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    # Bit for bit, NaN included.
    return got.contiguous().numpy(force=True).tobytes() == expected.numpy(force=True).tobytes()


def _stored(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
