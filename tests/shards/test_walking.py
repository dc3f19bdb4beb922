import io
import os
import re
import shutil
import subprocess
import tarfile

import pytest
import webdataset

from dali_echo.shards.walking import samples


def walk(path):
    with path.open("rb") as file:
        return samples(path, file)


def contents(path):
    """What the samples of a shard hold, cut out of the file by their offsets and sizes."""
    raw = path.read_bytes()
    return [
        (
            sample.key,
            {
                extension: raw[part.offset : part.offset + part.size]
                for extension, part in sample.components.items()
            },
        )
        for sample in walk(path)
    ]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize(
    "key",
    [
        "plain",
        "a folder/with spaces",
        "ключ/日本é",
        "v1.5/dots.in.folder/x",
        "d" * 90 + "/" + "n" * 60,
        "tab\tand%20percent",
    ],
)
def test_every_format_and_name_gives_what_was_written(write_tar, format, key):
    members = [
        (f"{key}{i}.{extension}", f"{i}{extension}".encode() * 300)
        for i in range(3)
        for extension in ("jpg", "cls")
    ]
    assert contents(write_tar("a.tar", members, format)) == [
        (f"{key}{i}", {e: f"{i}{e}".encode() * 300 for e in ("jpg", "cls")}) for i in range(3)
    ]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_far_beyond_100_characters(write_tar, format):
    key = "/".join(["long" * 20] * 6)
    assert contents(write_tar("a.tar", [(f"{key}.jpg", b"J"), (f"{key}.cls", b"7")], format)) == [
        (key, {"jpg": b"J", "cls": b"7"})
    ]


def test_agrees_with_webdataset_on_its_own_writer(tmp_path):
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(5):
            writer.write({"__key__": f"k/{i}", "left.png": b"L" * i, "txt": "t", "cls": i})
    theirs = [
        (sample["__key__"], {k: v for k, v in sample.items() if not k.startswith("__")})
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    assert contents(path) == theirs


def test_components_need_not_be_neighbours(write_tar):
    jpgs = [(f"{i}.jpg", b"J%d" % i) for i in range(3)]
    labels = [(f"{i}.cls", b"%d" % i) for i in (2, 0, 1)]
    assert contents(write_tar("a.tar", jpgs + labels)) == [
        (str(i), {"jpg": b"J%d" % i, "cls": b"%d" % i}) for i in range(3)
    ]


def test_a_component_that_is_there_already_begins_a_new_sample(write_tar):
    path = write_tar("a.tar", [("a.jpg", b"1"), ("a.cls", b"1"), ("a.JPG", b"2"), ("a.cls", b"2")])
    assert contents(path) == [("a", {"jpg": b"1", "cls": b"1"}), ("a", {"jpg": b"2", "cls": b"2"})]


def test_the_key_ends_at_the_first_dot_of_the_base_name(write_tar):
    path = write_tar("a.tar", [("d.x/a.v1.JPG", b"1"), ("d.x/a.cls", b"2")])
    assert contents(path) == [("d.x/a", {"v1.jpg": b"1", "cls": b"2"})]


def test_what_is_no_component_is_skipped(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:

        def add(name, kind=tarfile.REGTYPE, data=b"", target=""):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), target
            tar.addfile(info, io.BytesIO(data))

        add("._0.jpg", data=b"macOS")
        add("README", data=b"no extension")
        add("folder.d", tarfile.DIRTYPE)
        add("folder.d/0.jpg", data=b"J")
        add("folder.d/1.jpg", tarfile.SYMTYPE, target="0.jpg")
        add("folder.d/.hidden.cls", data=b"5")
        add("trailing.", data=b"empty extension")
        add("folder.d/0.cls", data=b"7")
    assert contents(path) == [("folder.d/0", {"jpg": b"J", "cls": b"7"})]


def test_names_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        info = tarfile.TarInfo("é.jpg")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"J"))
    ((key, components),) = contents(path)
    assert os.fsencode(key) == "é".encode("latin-1")
    assert components == {"jpg": b"J"}


def test_a_tar_without_end_mark_is_read(write_tar):
    path = write_tar("a.tar", [("a.cls", b"1"), ("b.cls", b"2")])
    path.write_bytes(path.read_bytes()[: 4 * 512])
    assert contents(path) == [("a", {"cls": b"1"}), ("b", {"cls": b"2"})]


def complaint(path):
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        walk(path)
    return str(error.value)


def test_truncated_anywhere_inside_a_member(write_tar):
    path = write_tar("a.tar", [("a.jpg", b"J" * 700), ("b.jpg", b"K" * 700)])
    whole = path.read_bytes()
    for cut in (100, 511, 513, 1500, 1536 + 100, 1536 + 512, 1536 + 1535):
        path.write_bytes(whole[:cut])
        assert re.search("not a complete|cut-off", complaint(path)), cut


def test_a_damaged_header_in_the_middle(write_tar):
    path = write_tar("a.tar", [(f"{i}.cls", b"1") for i in range(4)])
    raw = bytearray(path.read_bytes())
    raw[2 * 1024 + 5] ^= 0xFF
    path.write_bytes(raw)
    assert "at byte 2048, or one with a wrong checksum" in complaint(path)


def test_two_tars_in_one_file(write_tar):
    path, other = (write_tar(name, [("a.cls", b"1")]) for name in ("a.tar", "b.tar"))
    path.write_bytes(path.read_bytes() + other.read_bytes())
    assert "several tars in one file" in complaint(path)


@pytest.mark.parametrize(
    "raw", [b"", b"<html>not found</html>" * 100, b"\x1f\x8b\x08\x00" + b"x" * 2000, b"short"]
)
def test_what_is_no_tar(tmp_path, raw):
    path = tmp_path / "a.tar"
    path.write_bytes(raw)
    assert "not a complete, uncompressed tar archive" in complaint(path)


def test_no_sample(write_tar):
    assert "none of its 0 member(s)" in complaint(write_tar("a.tar", []))
    assert "none of its 2 member(s)" in complaint(write_tar("b.tar", [("README", b"x"), ("._a.jpg", b"x")]))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
def test_sparse_member(tmp_path):
    with (tmp_path / "hole.bin").open("wb") as file:
        file.truncate(1 << 20)
    path = tmp_path / "a.tar"
    subprocess.run(["tar", "-C", tmp_path, "--sparse", "-cf", path, "hole.bin"], check=True)
    assert "sparse" in complaint(path)
