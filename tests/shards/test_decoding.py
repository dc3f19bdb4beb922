import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from dali_echo.shards import decoding
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


def test_good_and_bad_images_in_one_batch():
    images = {**GOOD, **{name: image for name, (image, _) in BAD.items()}}
    names = sorted(images)
    complaints = dict(zip(names, Decoder().complaints([images[name] for name in names]), strict=True))
    assert {name for name, complaint in complaints.items() if complaint is None} == set(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_the_reason(name):
    image, reason = BAD[name]
    (complaint,) = Decoder().complaints([image])
    assert re.search(reason, complaint), complaint


def test_a_decoder_goes_on_after_a_bad_image():
    decoder = Decoder()
    for _ in range(3):
        assert [c is None for c in decoder.complaints([GOOD["jpeg"], b"junk", GOOD["png"]])] == [
            True,
            False,
            True,
        ]
    assert decoder.complaints([]) == []


def test_batches_are_limited_in_images_and_in_pixels(monkeypatch):
    monkeypatch.setattr(decoding, "_BATCH_IMAGES", 3)
    monkeypatch.setattr(decoding, "_BATCH_PIXELS", 100)
    sizes = [10, 10, 10, 10, 95, 10, 200, 1]
    assert list(decoding._batches(list(range(8)), sizes)) == [[0, 1, 2], [3], [4], [5], [6], [7]]


def test_which_extensions_are_images():
    assert all(map(is_image, ["jpg", "jpeg", "png", "left.png", "gif"]))
    assert not any(map(is_image, ["cls", "json", "jpg.txt"]))
