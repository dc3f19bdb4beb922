"""Encoded images, good and damaged in the ways that users have met."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encode(format: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """An image of noise."""
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, format, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def broken_png() -> bytes:
    """A PNG whose header is right, and whose pixels' checksum is not."""
    image = bytearray(encode("PNG"))
    image[60] ^= 1
    return bytes(image)


_JPEG, _PNG = encode("JPEG"), encode("PNG")

GOOD = {
    "jpeg": _JPEG,
    "progressive": encode("JPEG", progressive=True),
    "grey": encode("JPEG", "L"),
    "cmyk": encode("JPEG", "CMYK"),
    "png": _PNG,
    "palette": encode("PNG", "P"),
    "16 bits": encode("PNG", "I;16"),
    "grey and alpha": encode("PNG", "LA"),
    "webp": encode("WEBP"),
    "bmp": encode("BMP"),
    "tiff": encode("TIFF"),
    "ppm": encode("PPM"),
    "jpeg 2000": encode("JPEG2000"),
    "trailing junk": _JPEG + b"junk",
    "much trailing junk": _JPEG + bytes(1000),
    # DALI needs no end marker where enough follows, such as what fills up a block.
    "zeros in the place of the end marker": _JPEG[:-2] + bytes(512),
}
BAD = {
    "no bytes": (b"", "no bytes"),
    "html": (b"<html>not found</html>", r"DALI does not decode it; it begins with b'<html>not found<'"),
    "half a JPEG": (_JPEG[: len(_JPEG) // 2], "Pillow says: image file is truncated"),
    "a JPEG without its end marker": (_JPEG[:-2], "DALI does not decode it"),
    "the header of a JPEG": (_JPEG[:100], "DALI does not decode it"),
    "half a PNG": (_PNG[: len(_PNG) // 2], "DALI does not decode it; "),
    "a PNG with another checksum": (broken_png(), "DALI does not decode it; "),
    "half a WebP": (GOOD["webp"][: len(GOOD["webp"]) // 2], "DALI does not decode it; "),
    "half a BMP": (GOOD["bmp"][: len(GOOD["bmp"]) // 2], "DALI does not decode it; "),
    "half a TIFF": (GOOD["tiff"][: len(GOOD["tiff"]) // 2], "DALI does not decode it; "),
    "GIF": (encode("GIF"), "Pillow reads it, as GIF of mode"),
    "ICO": (encode("ICO", size=(32, 32)), "Pillow reads it, as ICO of mode"),
    "bomb": (bomb(60_000, 60_000), r"60000 × 60000 pixels"),
}
