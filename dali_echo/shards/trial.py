"""Decoding one image in a process of its own, which is all that ends if that crashes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import weakref
from typing import BinaryIO, cast

from dali_echo.shards import decoding

# The module alone: the package would bring torch along, which takes longer to start than DALI.
_CODE = f"import runpy; runpy.run_path({decoding.__file__!r})['serve']"


class Trial:
    """Tries images with DALI's decoder.

    Args:
        device_id: of the GPU, for the decoder that works there.
    """

    def __init__(self, device_id: int | None = None) -> None:
        self._device_id = device_id
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def decodes(self, image: bytes) -> bool:
        """Whether an encoded image decodes to RGB, without an error or a crash."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            requests, answers = (cast(BinaryIO, p) for p in (self._process.stdin, self._process.stdout))
            try:
                requests.write(len(image).to_bytes(decoding.SIZE, "big") + image)
                requests.flush()
                answer = answers.read(1)
            except BrokenPipeError:
                answer = b""
            if not answer:  # it crashed
                _end(self._process)
                self._process = None
            return answer == decoding.DECODES

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{_CODE}({self._device_id})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _end, process)
        return process


@functools.cache
def shared(device_id: int | None = None) -> Trial:
    """The one of this process for a device."""
    return Trial(device_id)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
