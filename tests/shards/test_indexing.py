import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from nvidia.dali import fn, pipeline_def

from dali_echo import shards
from dali_echo.shards.indexing import shard_index

PAIR = [("0.cls", b"0"), ("1.cls", b"11")]


def test_one_index_per_shard_in_their_order(write_tar, cache):
    paths = [write_tar(f"{i}.tar", [(f"{i}.cls", b"1" * (i + 1))]) for i in (2, 0, 1)]
    files = shards.index(paths)
    assert [file.read_text() for file in files] == [f"v1.2 1\ncls 512 {i + 1} {i}.cls\n" for i in (2, 0, 1)]
    assert {file.parent for file in files} == {cache}


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


@pytest.mark.parametrize("lost", ["*.idx", "*.json"])
def test_a_cache_with_a_file_lost_is_mended(write_tar, cache, lost):
    path = write_tar("a.tar", PAIR)
    (file,) = shards.index([path])
    text = file.read_text()
    for victim in cache.glob(lost):
        victim.unlink()
    assert shards.index([path]) == [file]
    assert file.read_text() == text


def test_an_index_is_replaced_whole_and_never_rewritten_in_place(write_tar, cache):
    path = write_tar("a.tar", PAIR)
    (file,) = shards.index([path])
    text = file.read_text()
    with file.open() as reader:
        for summary in cache.glob("*.json"):
            summary.unlink()
        shards.index([path])
        assert os.fstat(reader.fileno()).st_ino != file.stat().st_ino
        assert reader.read() == text


def test_a_changed_shard_gets_a_new_index_in_place_of_the_old(write_tar, cache):
    path, other = write_tar("a.tar", PAIR), write_tar("b.tar", PAIR)
    old, kept = shards.index([path, other])
    status = path.stat()
    write_tar("a.tar", [("0.cls", b"0"), ("2.cls", b"22")])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    (new,) = shards.index([path])
    assert path.stat().st_size == status.st_size
    assert new != old
    assert "2.cls" in new.read_text()
    assert {file.with_suffix("") for file in cache.iterdir()} == {
        file.with_suffix("") for file in (new, kept)
    }


def test_a_read_only_folder_of_shards_is_left_alone(write_tar, tmp_path):
    path = write_tar("a.tar", PAIR)
    tmp_path.chmod(0o555)
    before = sorted(tmp_path.iterdir()), tmp_path.stat().st_mtime_ns
    (file,) = shards.index([path])
    assert file.exists()
    assert (sorted(tmp_path.iterdir()), tmp_path.stat().st_mtime_ns) == before


def test_a_cache_that_cannot_be_made_names_the_remedy(write_tar, tmp_path, monkeypatch):
    path = write_tar("a.tar", PAIR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    with pytest.raises(OSError, match=r"a\.tar/dali_echo.*set XDG_CACHE_HOME"):
        shards.index([path])


def test_without_xdg_cache_home_it_is_in_the_home_folder(write_tar, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (file,) = shards.index(write_tar("a.tar", PAIR))
    assert file.parent == tmp_path / ".cache" / "dali_echo" / "index"


def test_two_processes_at_once(write_tar, cache):
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
        for cached in cache.iterdir():
            cached.unlink()
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
    assert sorted(path.suffix for path in cache.iterdir()) == [".idx", ".json"]


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
