import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from nvidia.dali import fn, pipeline_def

from dali_echo import shards
from dali_echo.shards.indexing import shard_index
from dali_echo.shards.walking import samples

PAIR = [("0.cls", b"0"), ("1.cls", b"11")]


def test_an_index_beside_each_shard_in_their_order(write_tar, cache):
    paths = [write_tar(f"{i}.tar", [(f"{i}.cls", b"1" * (i + 1))]) for i in (2, 0, 1)]
    files = shards.index(paths)
    assert files == [path.with_name(f"{path.name}.idx") for path in paths]
    for i, file in zip((2, 0, 1), files, strict=True):
        assert re.fullmatch(rf"v1\.2 1 \{{.*\}}\ncls 512 {i + 1} {i}\.cls\n", file.read_text())
    assert not cache.exists()


def test_a_plain_dali_reader_takes_it(write_tar):
    """Names that would break the columns of an index are percent-encoded, the rest is kept."""
    path = write_tar("a b.tar", [("50% of é\u3000.left eye.jpg", b"J"), ("ключ.left eye.jpg", b"K")])

    @pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def definition():
        (index,) = shards.index([path])
        image = fn.readers.webdataset(paths=str(path), index_paths=str(index), ext="left%20eye.jpg", name="r")
        return image, fn.get_property(image, key="source_info")

    images, sources = definition().run()
    assert [images.at(i).tobytes() for i in range(2)] == [b"J", b"K"]
    assert [sources.at(i).tobytes().decode() for i in range(2)] == [
        f"{path}:512:50%25%20of%20é%E3%80%80.left%20eye.jpg",
        f"{path}:1536:ключ.left%20eye.jpg",
    ]


def test_a_cached_shard_is_not_read_again(write_tar):
    path = write_tar("a.tar", PAIR)
    first = shard_index(path)
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = shard_index(path)
    assert (again.file, again.samples) == (first.file, 2)


@pytest.mark.parametrize(
    "broken",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:20],
        lambda raw: raw.replace(b'"dali_echo": 1', b'"dali_echo": 0'),
        lambda raw: re.sub(rb', "layouts": .*(, "not_integer)', rb"\1", raw),
    ],
)
def test_an_index_of_ours_that_is_cut_or_of_another_version_is_not_used(write_tar, broken):
    path = write_tar("a.tar", PAIR)
    whole = shards.index([path])[0].read_bytes()
    path.with_name("a.tar.idx").write_bytes(broken(whole))
    (file,) = shards.index([path])
    assert file.read_bytes() == whole


def test_an_index_is_replaced_whole_and_never_rewritten_in_place(write_tar):
    path = write_tar("a.tar", PAIR)
    (file,) = shards.index([path])
    text = file.read_text()
    with file.open() as reader:
        os.utime(path, ns=(1, 1))
        assert shards.index([path]) == [file]
        assert os.fstat(reader.fileno()).st_ino != file.stat().st_ino
        assert reader.read() == text


def test_a_changed_shard_gets_a_new_index_in_place_of_the_old(write_tar, tmp_path):
    path, other = write_tar("a.tar", PAIR), write_tar("b.tar", PAIR)
    old, kept = shards.index([path, other])
    kept_text, status = kept.read_text(), path.stat()
    write_tar("a.tar", [("0.cls", b"0"), ("2.cls", b"22")])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert path.stat().st_size == status.st_size
    assert shards.index([path]) == [old]
    assert "2.cls" in old.read_text()
    assert kept.read_text() == kept_text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.tar", "a.tar.idx", "b.tar", "b.tar.idx"]


@pytest.mark.parametrize("foreign", [b"", b"v1.2 2\ncls 512 1 0.cls\ncls 1536 2 1.cls\n", b"\xff{my notes}"])
def test_a_file_of_another_program_is_left_alone(write_tar, cache, foreign):
    path = write_tar("a.tar", PAIR)
    theirs = path.with_name("a.tar.idx")
    theirs.write_bytes(foreign)
    for _ in range(2):
        (file,) = shards.index([path])
        assert file.parent == cache
    assert theirs.read_bytes() == foreign


def test_a_name_too_long_for_a_neighbour(write_tar, cache):
    (file,) = shards.index(write_tar("x" * 251 + ".tar", PAIR))
    assert file.parent == cache


@pytest.fixture
def no_rights():
    """A folder whose shards a process without root's rights reads, and cannot write beside."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = Path(folder) / "shards"
        path.mkdir()
        yield path
        os.seteuid(os.getuid())
        path.chmod(0o755)


def as_nobody(folder):
    folder.chmod(0o555)
    if os.getuid() == 0:
        os.seteuid(65534)


def test_a_read_only_folder_of_shards_is_left_alone(no_rights, monkeypatch, write_tar):
    path = no_rights / "a.tar"
    path.write_bytes(write_tar("a.tar", PAIR).read_bytes())
    home = no_rights.parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    as_nobody(no_rights)
    before = no_rights.stat().st_mtime_ns
    (file,) = shards.index([path])
    assert file.is_relative_to(home)
    text = file.read_text()
    assert list(no_rights.iterdir()) == [path]
    assert no_rights.stat().st_mtime_ns == before
    os.utime(file, ns=(1, 1))
    assert shards.index([path]) == [file]
    assert file.stat().st_mtime_ns == 1  # found, not made again
    assert file.read_text() == text


def test_neither_folder_can_be_written(no_rights, monkeypatch, write_tar):
    path = no_rights / "a.tar"
    path.write_bytes(write_tar("a.tar", PAIR).read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    as_nobody(no_rights)
    with pytest.raises(OSError, match=r"a\.tar/dali_echo.*set XDG_CACHE_HOME"):
        shards.index([path])


def test_who_may_read_the_shard_may_read_its_index(write_tar):
    for mode in (0o644, 0o640, 0o444):
        path = write_tar(f"{mode}.tar", PAIR)
        path.chmod(mode)
        (file,) = shards.index([path])
        assert stat.S_IMODE(file.stat().st_mode) == mode


def test_without_xdg_cache_home_it_is_in_the_home_folder(write_tar, tmp_path, monkeypatch):
    path = write_tar("a.tar", PAIR)
    path.with_name("a.tar.idx").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (file,) = shards.index(path)
    assert file.parent == tmp_path / ".cache" / "dali_echo" / "index"


def test_a_shard_that_is_being_written(write_tar, monkeypatch):
    path = write_tar("a.tar", PAIR)

    def walk(shard, file):
        os.utime(shard, ns=(5, 5))
        return samples(shard, file)

    monkeypatch.setattr("dali_echo.shards.indexing.samples", walk)
    with pytest.raises(ValueError, match=r"a\.tar: the shard changed while it was read"):
        shards.index(path)
    assert not path.with_name("a.tar.idx").exists()


def test_two_processes_at_once(write_tar, tmp_path):
    path = write_tar("a.tar", [(f"{i}.cls", b"%d" % i) for i in range(3000)])
    (file,) = shards.index([path])
    expected = file.read_bytes()
    code = """if True:
        import sys
        from dali_echo import shards
        print("ready", flush=True)
        for _ in sys.stdin:
            (file,) = shards.index([sys.argv[1]])
            print(file, flush=True)
            print(len(file.read_bytes()), flush=True)
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for _ in range(10):
        file.unlink()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert Path(process.stdout.readline().strip()) == file
            assert int(process.stdout.readline()) == len(expected)
        assert file.read_bytes() == expected
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert sorted(tmp_path.iterdir()) == [path, file]


def test_one_bad_shard_among_good_ones_is_named(write_tar):
    good, bad = write_tar("good.tar", PAIR), write_tar("bad.tar", PAIR)
    bad.write_bytes(bad.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"bad\.tar.*unexpected end of data"):
        shards.index([good, bad])
    assert not any("bad" in file.read_text() for file in shards.index([good]))


def test_what_samples_hold_is_known_from_the_cache(write_tar):
    path = write_tar(
        "a.tar",
        [("0.jpg", b""), ("0.cls", b"1"), ("1.JPG", b""), ("1.cls", b"cat"), ("2.jpg", b"")],
        tarfile.PAX_FORMAT,
    )
    for _ in range(2):
        index = shard_index(path)
        assert index.samples == 3
        assert [(list(names), key) for names, key in index.layouts] == [
            (["cls", "jpg"], "0"),
            (["jpg"], "2"),
        ]
        assert {name: tuple(found) for name, found in index.not_integer.items()} == {"cls": ("1", "cat")}
