import os
import tempfile
from pathlib import Path

import pytest

from dali_echo import shards


def problems(*paths, **options):
    return [(f.shard.name, f.key, f.problem) for f in shards.verify(paths, **options)]


def pairs(*keys, extension="jpg", label=b"7"):
    return [part for key in keys for part in ((f"{key}.{extension}", b"J"), (f"{key}.cls", label))]


def test_nothing_wrong(write_tar, jpeg):
    members = [(f"{i}.{e}", d) for i in range(70) for e, d in (("jpg", jpeg(i)), ("cls", b"%d" % i))]
    assert problems(write_tar("a.tar", members), write_tar("b.tar", members), decode=True) == []


def test_damaged_tars(write_tar):
    good = write_tar("good.tar", pairs("a", "b"))
    raw = good.read_bytes()
    damaged = {
        "truncated": raw[: 6 * 512 + 1],
        "bad header": raw[: 4 * 512] + b"x" + raw[4 * 512 + 1 :],
        "concatenated": raw + raw,
        "trailing data": raw + b"junk",
        "not a tar": b"<html>" * 200,
    }
    for problem, content in damaged.items():
        good.with_name(f"{problem}.tar").write_bytes(content)
    paths = [good, *(good.with_name(f"{problem}.tar") for problem in damaged)]
    found = problems(*paths)
    assert [(name, problem) for name, _, problem in found if problem in damaged] == [
        (f"{problem}.tar", problem) for problem in damaged
    ]
    assert all(name != "good.tar" for name, _, _ in found)


def test_the_damage_names_the_last_whole_sample(write_tar):
    path = write_tar("a.tar", pairs("k/a", "k/b"))
    path.write_bytes(path.read_bytes()[: 7 * 512])
    (finding,) = (f for f in shards.verify(path) if f.problem == "truncated")
    assert "in member 'k/b.cls', after sample 'k/b'. Fetch or write the shard again" in finding.detail


def test_a_component_that_the_other_samples_have(write_tar):
    usual, odd = write_tar("a.tar", pairs(*"abcd")), write_tar("b.tar", [("x.jpg", b"J"), ("y.cls", b"1")])
    assert problems(usual, odd) == [("b.tar", "x", "missing component"), ("b.tar", "y", "missing component")]


def test_components_that_are_asked_for(write_tar):
    path = write_tar("a.tar", [("a.jpg", b""), ("a.txt", b""), ("b.jpeg", b""), ("c.jpg", b"")])
    assert problems(path, ext=["jpg;jpeg"]) == []
    assert problems(path, ext=["jpg", "txt"]) == [
        ("a.tar", "b", "missing component"),
        ("a.tar", "b", "missing component"),
        ("a.tar", "c", "missing component"),
    ]
    with pytest.raises(ValueError, match="ext entry ';'"):
        shards.verify(path, [";"])


def test_a_key_that_is_there_twice(write_tar):
    path = write_tar("a.tar", [*pairs("a", "b"), *pairs("a")])
    assert problems(path) == [("a.tar", "a", "duplicate component")]


def test_extensions_that_do_not_match(write_tar):
    path = write_tar(
        "a.tar", [*pairs("a", "b", "c"), *pairs("d", extension="JPG"), *pairs("e", extension="v1.jpg")]
    )
    assert problems(path) == [("a.tar", "d", "upper-case extension"), ("a.tar", "e", "dotted extension")]


def test_components_with_dots_that_all_samples_have_are_meant(write_tar):
    assert problems(write_tar("a.tar", pairs("a", "b", extension="left.jpg"))) == []


def test_labels(write_tar):
    path = write_tar("a.tar", [*pairs("a"), *pairs("b", label=b"cat"), *pairs("c", label=b"9" * 30)])
    assert problems(path) == [("a.tar", "b", "label"), ("a.tar", "c", "label")]


def test_shards_that_are_nearly_empty(write_tar):
    full = [write_tar(f"{i}.tar", pairs(*(f"{i}-{k}" for k in range(30)))) for i in range(3)]
    assert problems(*full, write_tar("x.tar", pairs("a", "b", "c"))) == []
    assert problems(*full, write_tar("y.tar", pairs("a", "b"))) == [("y.tar", None, "near-empty")]
    assert problems(write_tar("z.tar", [("README", b"")])) == [("z.tar", None, "near-empty")]


@pytest.fixture
def not_root():
    yield lambda: os.getuid() == 0 and os.seteuid(65534)
    os.seteuid(os.getuid())


def test_a_shard_that_may_not_be_read_is_one_finding_among_others(write_tar, not_root):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("a.tar", "b.tar"):
            path = Path(folder, name)
            path.write_bytes(write_tar(name, pairs("a", label=b"cat")).read_bytes())
            path.chmod(0o600 if name == "a.tar" else 0o644)
        not_root()
        assert problems(f"{folder}/*.tar") == [("a.tar", None, "unreadable"), ("b.tar", "a", "label")]
        os.seteuid(os.getuid())


def test_a_damaged_shard_is_not_near_empty_as_well(tmp_path):
    (tmp_path / "zero.tar").touch()
    assert problems(tmp_path / "zero.tar") == [("zero.tar", None, "not a tar")]


def test_images(write_tar, jpeg):
    members = [(f"{i}.jpg", jpeg(i)) for i in range(100)]
    for bad, content in ((3, jpeg(3)[:200]), (64, b""), (99, b"<html>")):
        members[bad] = (f"{bad}.jpg", content)
    path = write_tar("a.tar", members)
    assert problems(path) == []
    assert problems(path, decode=True) == [("a.tar", key, "image") for key in ("3", "64", "99")]


@pytest.mark.parametrize("decode", [False, True])
def test_progress_moves_within_a_shard(write_tar, jpeg, decode):
    paths = [write_tar(f"{i}.tar", [(f"{k}.jpg", jpeg(k)) for k in range(1001)]) for i in range(2)]
    seen = {"Counting": [], "Verifying": []}
    shards.verify(paths, decode=decode, progress=lambda what, fraction: seen[what].append(fraction))
    for fractions in seen.values():
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1
        assert 0 < fractions[0] < 0.01
    for low, high in ((0.4, 0.5), (0.9, 1)):  # inside either shard
        assert any(low < fraction < high for fraction in seen["Counting"])
        assert any(low < fraction < high for fraction in seen["Verifying"])
