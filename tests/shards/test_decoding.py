import re

import pytest

from dali_echo.shards.decoding import Decoder, is_image
from tests.shards.images import BAD, GOOD


@pytest.mark.parametrize("name", GOOD)
def test_good_images(name):
    assert Decoder().complaint(GOOD[name]) is None


@pytest.mark.parametrize("name", BAD.keys() - {"bomb"})
def test_the_reason(name):
    image, reason = BAD[name]
    complaint = Decoder().complaint(image)
    assert re.search(reason, complaint), complaint


def test_a_bomb_is_not_tried():
    assert "3600000000 pixels) exceeds limit" in Decoder().complaint(BAD["bomb"][0])


def test_a_decoder_goes_on_after_a_bad_image():
    decoder = Decoder()
    images = [GOOD["jpeg"], b"junk", GOOD["png"]] * 3
    assert [decoder.complaint(image) is None for image in images] == [True, False, True] * 3


def test_which_extensions_are_images():
    assert all(map(is_image, ["jpg", "jpeg", "png", "left.png", "gif"]))
    assert not any(map(is_image, ["cls", "json", "jpg.txt"]))
