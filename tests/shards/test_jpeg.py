import io

import pytest
from PIL import Image

from dali_echo.shards import jpeg
from dali_echo.shards.trial import shared
from tests.shards.images import encode

SOF, DHT, SOS, DQT = 0xC0, 0xC4, 0xDA, 0xDB


def is_sound(image):
    return jpeg.is_sound(memoryview(image))


def split(image):
    """The segments up to the first scan, as [marker, body], and what follows them."""
    segments, at = [], 2
    while not segments or segments[-1][0] != SOS:
        length = int.from_bytes(image[at + 2 : at + 4], "big")
        segments.append([image[at + 1], bytearray(image[at + 4 : at + 2 + length])])
        at += 2 + length
    return segments, image[at:]


def join(segments, rest):
    head = b"".join(bytes([0xFF, m]) + (len(b) + 2).to_bytes(2, "big") + b for m, b in segments)
    return b"\xff\xd8" + head + rest


def changed(image, marker, change):
    """The image with the body of its first segment of that marker changed by a function."""
    segments, rest = split(image)
    change(next(body for m, body in segments if m == marker))
    return join(segments, rest)


def put(place, value):
    return lambda body: body.__setitem__(place, value)


def extend(body):
    body.extend(b"\0\0")


BASELINE, GREY, PROGRESSIVE = encode("JPEG"), encode("JPEG", "L"), encode("JPEG", progressive=True)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:2:0", "optimize": True},
        {"restart_marker_rows": 1},
        {"comment": b"\xff\xd9" * 50},
        {"qtables": [list(range(1, 65))]},
    ],
)
def test_a_good_one_is_sound(mode, progressive, options):
    assert is_sound(encode("JPEG", mode, progressive=progressive, **options))


def test_fill_bytes_and_trailing_bytes():
    assert is_sound(BASELINE[:2] + b"\xff\xff" + BASELINE[2:] + bytes(1000))


def test_a_scan_for_each_component():
    grey = encode("JPEG", "L", subsampling=0)
    segments, rest = split(grey)
    for marker, body in segments:
        if marker == SOF:
            body[5] = 3
            body += bytes([2, 0x11, 0, 3, 0x11, 0])
    scan = segments[-1:]
    others = b""
    for component in (2, 3):
        again = [[SOS, bytearray(scan[0][1])]]
        again[0][1][1] = component
        others += join(again, rest[:-2])[2:]
    image = join(segments, rest[:-2] + others + b"\xff\xd9")
    assert is_sound(image)
    assert shared().decodes(image)
    assert not is_sound(image[:-2])
    with Image.open(io.BytesIO(image)) as opened:
        assert opened.mode == "RGB"


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(changed(BASELINE, DQT, extend), id="quantization that is too long"),
        pytest.param(changed(BASELINE, DQT, put(0, 4)), id="quantization table 4"),
        pytest.param(changed(BASELINE, DQT, put(0, 0x10)), id="quantization of 16 bits, too short"),
        pytest.param(changed(BASELINE, DQT, put(0, 1)), id="no quantization table"),
        pytest.param(changed(BASELINE, DHT, extend), id="codes that are too many"),
        pytest.param(changed(BASELINE, DHT, put(0, 4)), id="Huffman table 4"),
        pytest.param(changed(BASELINE, DHT, put(0, 0x20)), id="Huffman tables of class 2"),
        pytest.param(changed(BASELINE, DHT, put(17, 16)), id="a difference of 16 bits"),
        pytest.param(
            changed(BASELINE, DHT, put(slice(1, 4), [2, 1, 3])),  # instead of 0, 1, 5
            id="no prefix code",
        ),
        pytest.param(BASELINE[:400], id="cut in a segment"),
        pytest.param(changed(BASELINE, SOF, put(0, 12)), id="12 bits"),
        pytest.param(changed(BASELINE, SOF, put(7, 0x51)), id="sampling by 5"),
        pytest.param(changed(BASELINE, SOF, put(7, 0x01)), id="sampling by 0"),
        pytest.param(changed(BASELINE, SOF, put(7, 0x44)), id="16 blocks and more in a unit"),
        pytest.param(changed(BASELINE, SOF, put(8, 3)), id="a quantization table that is not there"),
        pytest.param(changed(BASELINE, SOF, extend), id="components that are too many"),
        pytest.param(changed(BASELINE, SOS, put(1, 9)), id="a scan of no component"),
        pytest.param(changed(BASELINE, SOS, put(2, 0x33)), id="Huffman tables that are not there"),
        pytest.param(changed(BASELINE, SOS, extend), id="a scan's header that is too long"),
        pytest.param(changed(PROGRESSIVE, SOS, put(-3, 1)), id="AC of several components"),
        pytest.param(changed(PROGRESSIVE, SOS, put(-1, 0x2E)), id="a shift by 14"),
        pytest.param(PROGRESSIVE[:-2], id="no end"),
    ],
)
def test_what_is_not_sound_fails(image):
    assert not is_sound(image)
    assert not shared().decodes(image)
