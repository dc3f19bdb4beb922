"""checkpoint.pt: what a run needs to go on as if it had not been interrupted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from train.errors import TrainError

NAME = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write a state so that, whenever the process dies, the file is the old or the new one, and whole."""
    temporary = folder / f".{NAME}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / NAME)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainError(
            f"cannot write {folder / NAME}: {error.strerror}. Make room, or name another folder with --out"
        ) from error


def load(folder: Path) -> dict[str, Any] | None:
    """The state in a folder, or None if there is none yet.

    Raises:
        TrainError: if the file is damaged.
    """
    for left_over in folder.glob(f".{NAME}.*"):
        left_over.unlink(missing_ok=True)
    path = folder / NAME
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises whatever the damage leads it to
        raise TrainError(
            f"{path} is damaged ({type(error).__name__}). Remove it, and start again without --resume"
        ) from error
    return state
