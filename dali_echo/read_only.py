"""`read_only`: a Python function that may look into the echo buffer itself, since it cannot write there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

_MARKED = "_dali_echo_read_only"


def read_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function for `fn.python_function` arrays that it cannot write to.

    After a mark, what a Python function is given must not be the memory of the echo buffer, since it may
    write into it and later repeats would be of what it wrote. So the mark copies each batch first, in the
    thread that asks for it. With `read_only` there is nothing to fear, and no copy:

        image = fn.python_function(image, function=read_only(crop_and_resize), batch_processing=True)

    Args:
        function: for `fn.python_function` on the CPU, with or without `batch_processing`. It raises
            ValueError where it writes into an array that it was given.

    Raises:
        TypeError: when it runs, if it is given anything but NumPy arrays, as on the GPU.
    """

    @functools.wraps(function)
    def reading(*inputs: Any) -> Any:
        for batch in inputs:
            for array in batch if isinstance(batch, list) else [batch]:
                if not isinstance(array, np.ndarray):
                    raise TypeError(
                        f"read_only() cannot keep {function.__name__} from writing into a "
                        f"{type(array).__name__}, only into NumPy arrays: leave it out"
                    )
                array.flags.writeable = False
        return function(*inputs)

    setattr(reading, _MARKED, True)
    return reading


def is_read_only(operator: Any) -> bool:
    """Whether the Python function of an operator is one that `read_only` made."""
    # DALI keeps the user's function in the closure of its own, and nowhere else.
    closure = getattr(getattr(operator._op, "function", None), "__closure__", None)
    return any(getattr(cell.cell_contents, _MARKED, False) for cell in closure or ())
