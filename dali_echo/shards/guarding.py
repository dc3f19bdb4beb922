"""The guard behind a reader: it keeps images that DALI cannot decode from the decoders."""

from __future__ import annotations

import contextlib
import io
import re
from collections import deque
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode
from PIL import Image

from dali_echo.shards.decoding import by_pillow
from dali_echo.shards.screening import UNDECODABLE, is_suspect, refusal
from dali_echo.shards.skipped import SkippedLog
from dali_echo.shards.trial import shared

MOST_IN_A_ROW = 100
"""Damaged samples in a row that are left out, unless `max_errors` is a larger number."""
LEAST_READ = 1000
"""Samples that a fraction of errors is taken of at least, so that one early error is not all of them."""

Bytes = npt.NDArray[np.uint8]


class Guard:
    """Tells which samples hold an image that does not decode.

    Args:
        skipped: names the samples to leave out; None if one of them is an error.
        max_errors: how many samples to leave out at most: a number of them, or a fraction of those read.
    """

    def __init__(self, skipped: SkippedLog | None, max_errors: float) -> None:
        self._skipped = skipped
        self._max_errors = max_errors
        self._works = True
        self._any_data = False
        self._trial = shared()
        self._batches_to_try = 0
        # By origin, of every sample that was tried or is bad: why it is bad.
        self._known: dict[bytes, str | None] = {}
        self._different: set[bytes] = set()
        self._read = self._bad = self._in_a_row = 0
        self._recent: deque[list[tuple[bytes, int]]] = deque(maxlen=16)
        self.error: Exception | None = None
        """Why a batch was refused."""

    @property
    def skips(self) -> bool:
        """Whether bad samples are to be left out."""
        return self._skipped is not None

    def prepare(self, decodes: bool, any_data: bool, device_id: int | None) -> None:
        """Say which decoders of DALI's the images go to.

        Args:
            decodes: whether to any. Else a bad one is no error.
            any_data: whether to one on the CPU with `output_type=ANY_DATA`.
            device_id: of the GPU, if to one there.
        """
        self._works = decodes or self.skips
        self._any_data = any_data
        self._trial = shared(device_id)

    def behind(
        self, images: Sequence[DataNode], origins: Sequence[DataNode]
    ) -> tuple[list[DataNode], DataNode]:
        """The nodes with a tiny image in the place of each bad one, and a node of which rows are bad.

        Args:
            images: encoded.
            origins: of each, the text `SHARD:OFFSET:NAME` as uint8, as DALI's `source_info` has it.
        """
        bad = fn.python_function(*images, *origins, function=self._flags, batch_processing=True)
        tiny, _ = fn._conditional.split(types.Constant(_TINY, device="cpu"), predicate=bad)
        # Unlike the outputs of a Python function, those of these operators share the memory of the input.
        good = [fn._conditional.split(image, predicate=bad)[1] for image in images]
        return [fn._conditional.merge(tiny, image, predicate=bad) for image in good], bad

    def try_batches(self, count: int) -> None:
        """Decode each image of the next batches in another process before it goes on."""
        self._batches_to_try = count

    def culprit(self) -> str | None:
        """Which sample of the latest batches does not decode, and why, if it is in a local shard."""
        recent = list(self._recent)  # DALI may still read ahead
        for origin, size in (image for batch in recent for image in batch):
            shard, offset, _ = _parts(origin)
            with contextlib.suppress(OSError), open(shard, "rb") as file:
                file.seek(offset)
                reason = self._tried(np.frombuffer(file.read(size), np.uint8))
                if reason is not None:
                    return _describe(origin, reason)
        return None

    def _flags(self, *components: Sequence[Bytes]) -> list[npt.NDArray[np.bool_]]:
        if not self._works:
            return [np.array(False)] * len(components[0])
        count = len(components) // 2
        rows = list(zip(*components, strict=True))
        samples = [[(o.tobytes(), i) for i, o in zip(r[:count], r[count:], strict=True)] for r in rows]
        self._recent.append([(origin, image.size) for sample in samples for origin, image in sample])
        try:
            return [np.array(self._is_bad(sample)) for sample in samples]
        except Exception as error:
            self.error = self.error or error  # DALI hands on only its text
            raise
        finally:
            self._batches_to_try = max(0, self._batches_to_try - 1)

    def _is_bad(self, sample: list[tuple[bytes, Bytes]]) -> bool:
        reason = None
        for origin, image in sample:
            reason = reason or self._reason(origin, image)
        self._read += 1
        self._in_a_row = 0 if reason is None else self._in_a_row + 1
        if reason is not None:
            self._leave_out(sample[0][0], reason)
        return reason is not None

    def _reason(self, origin: bytes, image: Bytes) -> str | None:
        if origin in self._known:
            return self._known[origin]
        reason = refusal(image, any_data=self._any_data)
        if reason is not None:
            reason = self._known[origin] = _detailed(reason, image)
        elif self._batches_to_try or is_suspect(image):
            reason = self._known[origin] = self._tried(image)
        return reason

    def _tried(self, image: Bytes) -> str | None:
        return None if self._trial.decodes(image.tobytes()) else _detailed(UNDECODABLE, image)

    def _leave_out(self, origin: bytes, reason: str) -> None:
        if self._skipped is None:
            raise ValueError(
                f"{_describe(origin, reason)}. Repair the shard, or leave such samples out with "
                f'on_error="skip"; `dali-echo shards verify --decode` lists them all'
            )
        shard, _, key = _parts(origin)
        self._skipped.add(shard, key, reason)
        self._bad += 1
        self._different.add(origin)
        excess = self._excess()
        if excess:
            raise ValueError(
                f"{excess}, and the latest is {_describe(origin, reason)}. Repair the shards "
                f"(`dali-echo shards verify --decode` lists such samples), or allow more with max_errors"
            )

    def _excess(self) -> str | None:
        most = self._max_errors
        if most >= 1 or most == 0:
            over = len(self._different) > most
        else:
            over = self._bad > most * max(self._read, LEAST_READ)
        if over:
            read = f"{self._bad:,} of {self._read:,} samples read, {len(self._different):,} different ones, "
            return f"{read}do not decode: more than max_errors = {most:g}"
        if self._in_a_row > max(MOST_IN_A_ROW, most):
            return f"{self._in_a_row:,} samples in a row do not decode"
        return None


def _detailed(reason: str, image: Bytes) -> str:
    return f"{reason}; {by_pillow(image.tobytes())}" if reason is UNDECODABLE else reason


def _describe(origin: bytes, reason: str) -> str:
    shard, _, key = _parts(origin)
    return f"{shard}: sample {key!r}: {reason}"


def _parts(origin: bytes) -> tuple[str, int, str]:
    """The shard, where in it a component's bytes begin, and the sample's key."""
    shard, offset, name = _ORIGIN.fullmatch(origin).groups()  # type: ignore[union-attr]
    # As in the index, from which DALI has it: see `indexing.escape`.
    name = unquote_to_bytes(name).decode(errors="surrogateescape")
    folder, slash, file = name.rpartition("/")
    return shard.decode(errors="surrogateescape"), int(offset), folder + slash + file.partition(".")[0]


def _encode_tiny() -> Bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "JPEG")
    return np.frombuffer(file.getvalue(), np.uint8)


_ORIGIN = re.compile(rb"(.*?):(\d+):(.*)", re.DOTALL)
_TINY = _encode_tiny()
