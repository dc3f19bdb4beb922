import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from dali_echo.shards.decoding import Decoder, is_image


def encode(format, mode="RGB", size=(40, 30), **options):
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, format, **options)
    return file.getvalue()


def bomb(width, height):
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


GOOD = {
    "jpeg": encode("JPEG"),
    "progressive": encode("JPEG", progressive=True),
    "grey": encode("JPEG", "L"),
    "cmyk": encode("JPEG", "CMYK"),
    "png": encode("PNG"),
    "palette": encode("PNG", "P"),
    "webp": encode("WEBP"),
    "trailing junk": encode("JPEG") + b"junk",
}
BAD = {
    "no bytes": (b"", "no bytes"),
    "html": (b"<html>not found</html>", r"DALI does not decode it; it begins with b'<html>not found<'"),
    "half a JPEG": (GOOD["jpeg"][: len(GOOD["jpeg"]) // 2], "Pillow says: image file is truncated"),
    "half a PNG": (GOOD["png"][: len(GOOD["png"]) // 2], "DALI does not decode it; "),
    "GIF": (encode("GIF"), "Pillow reads it, as GIF of mode"),
    "bomb": (bomb(60_000, 60_000), r"3600000000 pixels\) exceeds limit"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_images(name):
    assert Decoder().complaint(GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_the_reason(name):
    image, reason = BAD[name]
    complaint = Decoder().complaint(image)
    assert re.search(reason, complaint), complaint


def test_a_decoder_goes_on_after_a_bad_image():
    decoder = Decoder()
    images = [GOOD["jpeg"], b"junk", GOOD["png"]] * 3
    assert [decoder.complaint(image) is None for image in images] == [True, False, True] * 3


def test_which_extensions_are_images():
    assert all(map(is_image, ["jpg", "jpeg", "png", "left.png", "gif"]))
    assert not any(map(is_image, ["cls", "json", "jpg.txt"]))
