"""Which encoded images DALI will not decode, seen without decoding them.

DALI's decoders read an image's header first, and an image that fails there, in a batch of others, can crash
the interpreter (DALI 2.4). nvImageCodec holds the parsers that DALI uses, so its answer is DALI's. An image
that fails later ends the pipeline, and now and then crashes as well: what may do so is suspect.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
from nvidia import nvimgcodec

from dali_echo.shards import jpeg

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
    """Whether an image that is not refused, encoded, of shape (bytes,), is to be tried before it is decoded.

    A JPEG or PNG is if its structure is damaged, a WebP if its length is wrong, and any other always.
    """
    view = image.data
    if image[0] == 0xFF:
        return not jpeg.is_sound(view)
    if image[0] == 0x89:
        return not _is_sound_png(view)
    return image[:4].tobytes() != b"RIFF" or not _is_sound_webp(view)


def _is_sound_png(image: memoryview) -> bool:
    at = 8
    while at + 12 <= len(image):
        length, kind = struct.unpack_from(">I4s", image, at)
        end = at + 8 + length
        if image[end : end + 4] != zlib.crc32(image[at + 4 : end]).to_bytes(4, "big"):
            return False
        if kind == b"IEND":
            return True
        at = end + 4
    return False


def _is_sound_webp(image: memoryview) -> bool:
    at = 12
    while at + 8 <= len(image):
        (length,) = struct.unpack_from("<I", image, at + 4)
        at += 8 + length + length % 2
    return at == len(image) == 8 + int.from_bytes(image[4:8], "little")
