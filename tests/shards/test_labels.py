import pytest

from dali_echo.shards import labels


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"0", 0),
        (b"7", 7),
        (b"123456789012", 123456789012),
        (b" 12\r\n", 12),
        (b"-3\n", -3),
        (b"+4", 4),
        (b"0007", 7),
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775808", -(2**63)),
    ],
)
def test_integers(text, number):
    assert labels.parse(text) == number


@pytest.mark.parametrize("text", [b"", b"cat", b"1.0", b"1 2", b"0x10", b"\xff", b"1\0"])
def test_no_integer(text):
    with pytest.raises(ValueError, match="invalid literal"):
        labels.parse(text)


@pytest.mark.parametrize("text", [b"9223372036854775808", b"-9223372036854775809"])
def test_beyond_int64(text):
    with pytest.raises(ValueError, match=f"{text.decode()}.*int64"):
        labels.parse(text)


def test_too_long():
    assert labels.parse(b"7".rjust(labels.LONGEST)) == 7
    with pytest.raises(ValueError, match="4097 bytes are too many"):
        labels.parse(b"7".rjust(labels.LONGEST + 1))


def test_which_extensions_are_labels():
    assert all(map(labels.is_label, ["cls", "cls2", "class", "count", "index", "inx", "id"]))
    assert labels.is_label("left.cls")
    assert not any(map(labels.is_label, ["jpg", "cls.txt", "clsx", "txt", "json"]))
