"""Which encoded images DALI will not decode, seen without decoding them.

DALI's decoders read an image's header first, and an image that fails there, in a batch of others, can crash
the interpreter (DALI 2.4). nvImageCodec holds the parsers that DALI uses, so its answer is DALI's. An image
that fails later only ends the pipeline; what is cheap to see of that makes it suspect.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from nvidia import nvimgcodec

MOST_PIXELS = 2 * 89_478_485
"""Of an image that is no decompression bomb: beyond it, Pillow refuses to open one."""

UNDECODABLE = "DALI does not decode it"

Bytes = npt.NDArray[np.uint8]


def refusal(image: Bytes, *, any_data: bool = False) -> str | None:
    """Say why an encoded image of shape (bytes,) must not reach a decoder; None if it may.

    Args:
        image: its bytes.
        any_data: whether a decoder on the CPU with `output_type=ANY_DATA` is to get it.
    """
    if not image.size:
        return "it has no bytes"
    stream = nvimgcodec.CodeStream(image)
    try:
        height, width = stream.height, stream.width
    except RuntimeError:
        return UNDECODABLE
    if not 0 < height * width <= MOST_PIXELS:
        return f"it has {width} × {height} pixels, and {MOST_PIXELS:,} are the most that is decoded"
    if any_data and stream.codec_name == "jpeg" and stream.num_channels != 3:
        return (
            f"a JPEG with {stream.num_channels} channel(s) fails in DALI's CPU decoder, or crashes it, with "
            f"output_type=types.ANY_DATA: use types.RGB"
        )
    return None


def is_suspect(image: Bytes) -> bool:
    """Whether the end of a JPEG or WebP image, of shape (bytes,), seems to be missing."""
    if image[0] == 0xFF:
        end = b"\xff\xd9"
        return end not in image[-64:].tobytes() and image.tobytes().rfind(end) < _start_of_scan(image)
    if image[:4].tobytes() == b"RIFF":
        return int.from_bytes(image[4:8].tobytes(), "little") + 8 > image.size
    return False


def _start_of_scan(image: Bytes) -> int:
    """Where a JPEG's compressed data begins: a thumbnail in its header has an end marker too."""
    at = 2
    while at + 4 <= image.size and image[at + 1] != 0xDA:
        fill = image[at + 1] == 0xFF
        at += 1 if fill else 2 + int.from_bytes(image[at + 2 : at + 4].tobytes(), "big")
    return at
