"""What a mark has done, as counted by the pipeline itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EchoStats:
    """Counts and times of one mark, up to the last batch that the pipeline has delivered.

    What the pipeline has prepared ahead of the trainer is not in them.
    """

    name: str
    """The mark's name."""
    fresh: int
    """Samples taken from the upstream. Those left out, and copies that pad a reader's last batch, do not
    count."""
    skipped: int
    """Samples that were left out before, since they do not decode: see `on_error` of `shards.read`."""
    emitted: int
    """Uses of them in the batches delivered; copies that pad a batch do not count."""
    factor: float
    """Mean number of uses of the items that are read at present; with "fill", of those used so far."""
    live_samples: int
    """Samples in the buffer that have uses left."""
    live_bytes: int
    """Bytes that they hold: with `memory_limit` their own, else all of the upstream batches they are in."""
    upstream_wait_s: float
    """Seconds for which the draws of these batches waited for the upstream, since the pipeline was made."""
    downstream_wait_s: float
    """Seconds for which the upstream had a batch ready and waited for it to be taken, since then."""
