import numpy as np
import pytest
from PIL import Image

from dali_echo import shards
from dali_echo.shards import Sizes


def test_what_shards_hold(write_tar):
    a = write_tar("a.tar", [("0.jpg", b"J" * 10), ("0.cls", b"3"), ("1.JPG", b"J" * 30), ("1.cls", b"12")])
    b = write_tar("b.tar", [("2.jpg", b"J" * 50), ("2.cls", b"3"), ("2.id", b"none")])
    info = shards.info([a, b])
    assert info.samples == {a: 2, b: 1}
    assert info.components == {"cls": 3, "id": 1, "jpg": 3}
    assert info.bytes["jpg"] == Sizes(least=10, median=30, greatest=50, total=90)
    assert info.classes == {"cls": {3: 2, 12: 1}}  # not "id", which is no class


def test_a_damaged_shard(write_tar):
    path = write_tar("a.tar", [("0.jpg", b"J")])
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"a\.tar.*unexpected end"):
        shards.info(path)


def test_the_preview_shows_images_from_all_shards(write_tar, jpeg, identify, tmp_path):
    paths = [
        write_tar(f"{s}.tar", [(f"{s}-{i}.jpg", jpeg(100 * s + i)) for i in range(60)]) for s in range(2)
    ]
    picture = tmp_path / "sheet.png"
    shards.preview(paths, picture)
    sheet = np.asarray(Image.open(picture))
    assert sheet.shape == (6 * 142, 8 * 128, 3)
    middles = [
        sheet[row * 142 + 60 : row * 142 + 66, col * 128 + 60 : col * 128 + 66]
        for row in range(6)
        for col in range(8)
    ]
    shown = [identify(middle) for middle in middles]
    assert shown == [100 * s + i * 60 // 24 for s in range(2) for i in range(24)]


def test_the_preview_has_room_for_what_does_not_decode(write_tar, jpeg, tmp_path):
    path = write_tar("a.tar", [("0.jpg", jpeg(5)), ("1.jpg", b"<html>")])
    shards.preview(path, tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape[0] == 142
    red, _, blue = sheet[:128, 128:256].astype(int).T
    assert (red - blue).max() > 100


def test_no_preview_without_images(write_tar, tmp_path):
    with pytest.raises(ValueError, match="no preview"):
        shards.preview(write_tar("a.tar", [("0.txt", b"x")]), tmp_path / "sheet.png")
