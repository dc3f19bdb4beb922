"""The error that the command line reports without a traceback."""

from __future__ import annotations


class TrainError(Exception):
    """What went wrong and what to do about it, for the person at the command line."""
