import numpy as np
import pytest

from dali_echo.shards.screening import is_suspect, refusal
from tests.shards.images import BAD, GOOD, bomb, encode

# Only these have a structure that is looked at.
LOOKED_AT = (b"\xff\xd8", b"\x89PNG", b"RIFF")


def array(image):
    return np.frombuffer(image, np.uint8)


@pytest.mark.parametrize("name", GOOD)
def test_good_images_are_not_refused(name):
    assert refusal(array(GOOD[name])) is None
    suspect = not GOOD[name].startswith(LOOKED_AT) or name == "zeros in the place of the end marker"
    assert is_suspect(array(GOOD[name])) == suspect


@pytest.mark.parametrize("name", BAD)
def test_what_dali_does_not_decode_is_refused_or_suspect(name):
    image = array(BAD[name][0])
    assert refusal(image) is not None or is_suspect(image)


@pytest.mark.parametrize("name", ["png", "webp"])
def test_what_is_cut_or_spliced_is_suspect(name):
    image = GOOD[name]
    for at in range(40, len(image)):
        assert is_suspect(array(image[:at]))
        assert is_suspect(array(image[: at - 2] + image[at:]))


def test_a_png_with_any_byte_changed_is_suspect():
    image = bytearray(GOOD["png"])
    for at in range(8, len(image)):
        image[at] ^= 1
        assert is_suspect(array(bytes(image)))
        image[at] ^= 1
    assert not is_suspect(array(bytes(image) + b"junk"))


def test_the_end_marker_of_a_thumbnail_is_not_the_image_s():
    image, thumbnail = encode("JPEG"), encode("JPEG", size=(8, 8))
    segment = b"\xff\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    with_thumbnail = image[:2] + segment + image[2:]
    assert refusal(array(with_thumbnail)) is None
    assert not is_suspect(array(with_thumbnail))
    assert is_suspect(array(with_thumbnail[:-200]))


@pytest.mark.parametrize("size", [(179, 10**6), (10**6, 179)])
def test_the_limit_on_pixels(size):
    assert "178,956,970 are the most" in refusal(array(bomb(*size)))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpegs_that_any_data_does_not_decode(mode):
    # DALI's CPU decoder crashes the interpreter on a grey JPEG with ANY_DATA, and fails on CMYK (DALI#695).
    image = array(encode("JPEG", mode))
    assert "use types.RGB" in refusal(image, any_data=True)
    assert refusal(image) is None
    assert refusal(array(encode("JPEG")), any_data=True) is None
    assert refusal(array(encode("PNG", "L")), any_data=True) is None
