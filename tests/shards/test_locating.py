import pytest

from dali_echo import shards
from dali_echo.shards.locating import expand, local_paths


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.tar", "a.tar", "a.tar.idx", "sub/deep/c.tar", "x[1].tar", "{y}.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{b,a}.tar", ["b.tar", "a.tar"]),
        ("?.tar", ["a.tar", "b.tar"]),
        ("a.*", ["a.tar"]),
        ("**/c.tar", ["sub/deep/c.tar"]),
        ("{sub/*,.}/*.tar", ["sub/deep/c.tar", "./a.tar", "./b.tar", "./x[1].tar", "./{y}.tar"]),
        ("x[1].tar", ["x[1].tar"]),
        ("{y}.tar", ["{y}.tar"]),
        (["b.tar", "[ab].tar"], ["b.tar", "a.tar", "b.tar"]),
        ("https://h/{0..1}.tar?x=*", ["https://h/0.tar?x=*", "https://h/1.tar?x=*"]),
        ("pipe:cat {0..1}.tar *", ["pipe:cat {0..1}.tar *"]),
        (["s3://b/k.tar", "a.tar"], ["s3://b/k.tar", "a.tar"]),
    ],
)
def test_what_stands_for_shards(folder, given, expected):
    assert [name.removeprefix("./") for name in expand(given)] == [e.removeprefix("./") for e in expected]


def test_a_text_file_is_relative_to_its_folder(folder):
    (folder / "sub/all.txt").write_text(
        "\ufeff# shards\n\n ../{a,b}.tar \ndeep/*.tar\nhttps://h/{0..1}.tar\n"
        + str(folder / "b.tar")
        + "\r\n"
    )
    assert expand("sub/all.txt") == [
        "sub/../a.tar",
        "sub/../b.tar",
        "sub/deep/c.tar",
        "https://h/0.tar",
        "https://h/1.tar",
        str(folder / "b.tar"),
    ]


def test_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert local_paths("~/[ab].tar") == [folder / "a.tar", folder / "b.tar"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "no shards given"),
        ("z*.tar", FileNotFoundError, r"no shard matches 'z\*.tar'"),
        ("{a,z}.tar", FileNotFoundError, "1 of 2 shards do not exist: z.tar"),
        ("none.txt", FileNotFoundError, "none.txt"),
        ("sub", ValueError, r"sub is a folder: name the shards in it, such as 'sub/\*.tar'"),
        ("https://h/a.tar", ValueError, "only local shards"),
        ("empty.txt", ValueError, "empty.txt lists no shard"),
        ("nested.txt", ValueError, "'nested.txt' is a list, too"),
        ("binary.txt", ValueError, "binary.txt: a list of shards must be text in UTF-8"),
    ],
)
def test_errors_name_what_was_given(folder, given, error, message):
    (folder / "empty.txt").write_text("# nothing\n")
    (folder / "nested.txt").write_text("nested.txt\n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(error, match=message):
        local_paths(given)


def test_a_pattern_still_means_the_shards_after_they_have_indexes(write_tar, tmp_path):
    write_tar("a.tar", [("0.cls", b"0")])
    first = shards.index(tmp_path / "a*")
    assert shards.index(tmp_path / "a*") == first
