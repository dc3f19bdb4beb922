import contextlib
import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_echo.shards.tar import DamagedTarError, Member, members

FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
PARTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=60
).filter(lambda part: part not in (".", ".."))
NAMES = st.lists(PARTS, min_size=1, max_size=8).map("/".join)
KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]
)


class Archive(bytes):
    def __repr__(self):
        return f"a tar of {len(self)} bytes"


@st.composite
def archives(draw):
    """A tar as `tarfile` writes it, of any kind of members and names."""
    format = draw(FORMATS)
    shared = draw(st.dictionaries(st.sampled_from(["comment", "uname"]), st.text(max_size=20)))
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format, pax_headers=shared) as tar:
        for name in ["first", *draw(st.lists(NAMES, max_size=5))]:
            info = tarfile.TarInfo(name)
            info.type = draw(KINDS)
            if info.type == tarfile.AREGTYPE and len(name.encode()) > 100:
                # If the name is cut behind a "/", tarfile takes this for a folder; GNU tar does not.
                info.type = tarfile.REGTYPE
            info.mtime = draw(st.sampled_from([0, 1.5]))
            info.linkname = draw(NAMES) if info.issym() else ""
            data = draw(st.binary(max_size=1200)) if info.isreg() else b""
            info.size = len(data)
            with contextlib.suppress(ValueError):  # USTAR does not hold every name
                tar.addfile(info, io.BytesIO(data))
    return Archive(raw.getvalue())


def by_tarfile(raw):
    with tarfile.open(fileobj=io.BytesIO(raw), encoding="utf-8") as tar:
        return [(info.name, info.offset_data, info.size, info.isreg()) for info in tar]


def ours(raw):
    return [
        (name.rstrip("/") if not is_file else name, offset, size, is_file)
        for name, offset, size, is_file in members(io.BytesIO(raw))
    ]


@given(archives())
@settings(max_examples=60, deadline=None)
def test_agrees_with_tarfile(raw):
    assert ours(raw) == by_tarfile(raw)


@given(archives(), st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_an_error_or_makes_no_difference(raw, data):
    """Anything may come in, and DamagedTarError is all that may come out."""
    raw = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        for member in members(io.BytesIO(raw)):
            assert 0 <= member.offset <= member.offset + member.size <= len(raw) or not member.is_file
    except DamagedTarError:
        pass


@given(archives(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_in_a_header_is_noticed(raw, data):
    at = data.draw(st.integers(0, 511).filter(lambda at: not 148 <= at < 156))
    raw = bytearray(raw)
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedTarError):
        list(members(io.BytesIO(raw)))


@given(archives(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_gives_the_members_before_it(raw, data):
    whole = ours(raw)
    cut = raw[: data.draw(st.integers(1, len(raw)))]
    found = []
    kind = None
    try:
        for member in members(io.BytesIO(cut)):
            found.append(member)
    except DamagedTarError as error:
        kind = error.kind
    kinds = {"not a tar"} if len(cut) < 512 else {None, "truncated"}
    if len(found) < len(whole) and len(cut) % 512:
        kinds -= {None}  # what is lost does not go unnoticed
    assert kind in kinds
    assert [member.offset for member in found] == [offset for _, offset, _, _ in whole[: len(found)]]


def header(size_field=b"00000000001\0", name=b"a.jpg", kind=b"0", signed=False):
    block = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.USTAR_FORMAT))
    block[:100] = name.ljust(100, b"\0")
    block[124:136] = size_field
    block[156:157] = kind
    block[148:156] = b" " * 8
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in block)
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


def test_sizes_in_base_256():
    """GNU tar writes sizes from 8 GiB on like this."""
    with pytest.raises(DamagedTarError, match=r"unexpected end of data at byte 1024, in member 'a\.jpg'"):
        list(members(io.BytesIO(header(b"\x80" + (9 << 30).to_bytes(11, "big")) + bytes(512))))
    raw = header(b"\x80" + (7).to_bytes(11, "big")) + b"J" * 7 + bytes(505)
    assert list(members(io.BytesIO(raw))) == [Member("a.jpg", 512, 7, True)]


def test_sizes_and_sums_that_fill_their_fields():
    raw = bytearray(header(b"000000000007"))
    raw[148:156] = b"%08o" % int(raw[148:154], 8)
    assert list(members(io.BytesIO(bytes(raw) + b"J" * 7 + bytes(505)))) == [Member("a.jpg", 512, 7, True)]


def test_old_tars_that_add_signed_bytes():
    raw = header(name="é.jpg".encode(), signed=True) + b"J" + bytes(511)
    assert [member.name for member in members(io.BytesIO(raw))] == ["é.jpg"]


def test_a_pax_size_rules_over_the_header():
    body = b"13 size=1000\n"
    raw = (
        header(b"%011o\0" % len(body), kind=b"x")
        + body.ljust(512, b"\0")
        + header(b"00000000000\0")
        + b"J" * 1000
        + bytes(24)
        + header(name=b"b.jpg")
        + b"K".ljust(512, b"\0")
    )
    assert list(members(io.BytesIO(raw))) == [
        Member("a.jpg", 1536, 1000, True),
        Member("b.jpg", 3072, 1, True),
    ]
    assert ours(raw) == by_tarfile(raw)


@pytest.mark.parametrize(
    "body", [b"13 size=10x0\n", b"99 path=a\n", b"5 path=a\n", b"path=a\n", b"13 size=-999\n"]
)
def test_pax_records_that_are_none(body):
    raw = header(b"%011o\0" % len(body), kind=b"x") + body.ljust(512, b"\0") + header() + bytes(512)
    with pytest.raises(DamagedTarError, match="at byte") as error:
        list(members(io.BytesIO(raw)))
    assert error.value.kind == "bad header"


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "not a tar"),
        (b"<html>not found</html>" * 100, "not a tar"),
        (b"\x1f\x8b\x08\x00" + b"x" * 2000, "not a tar"),
        (header() + b"J" + bytes(511) + bytes(1024) + header() + bytes(512), "concatenated"),
        (header() + b"J" + bytes(511) + bytes(1024) + b"junk", "trailing data"),
        (header() + b"J" + bytes(511) + b"junk" * 128, "bad header"),
        (header() + b"J" + bytes(511) + header()[:100], "truncated"),
        (header() + b"J" + bytes(500), "truncated"),
        (header(kind=b"S") + bytes(512), "sparse"),
        (header(b"-0000001000\0"), "not a tar"),
        (header() + b"J" + bytes(511) + header(b"-0000001000\0"), "bad header"),
    ],
)
def test_kinds_of_damage(raw, kind):
    with pytest.raises(DamagedTarError) as error:
        list(members(io.BytesIO(raw)))
    assert error.value.kind == kind


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_that_a_header_cuts_behind_a_slash_is_no_folder(format):
    raw = io.BytesIO()
    info = tarfile.TarInfo(f"{'a' * 99}/b.jpg")
    info.type, info.size = tarfile.AREGTYPE, 1
    with tarfile.open(fileobj=raw, mode="w", format=format) as tar:
        tar.addfile(info, io.BytesIO(b"J"))
    assert list(members(raw)) == [Member(info.name, raw.getvalue().index(b"J\0\0"), 1, True)]


def test_an_end_far_behind():
    raw = header() + b"J" + bytes(511) + bytes(5 << 20)
    assert len(list(members(io.BytesIO(raw)))) == 1
    with pytest.raises(DamagedTarError, match=f"another begins at byte {len(raw)}"):
        list(members(io.BytesIO(raw + header() + bytes(512))))
