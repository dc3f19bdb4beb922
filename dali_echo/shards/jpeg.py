"""Whether the structure of a JPEG holds, seen without decoding it.

The rules are those of ITU-T T.81, annex B, that libjpeg, which DALI uses, insists on. Photos share many of
their tables, so what a segment says is remembered by its bytes.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import NamedTuple

_SOF, _PROGRESSIVE = (0xC0, 0xC1, 0xC2), 0xC2
_DHT, _EOI, _SOS, _DQT, _DRI = 0xC4, 0xD9, 0xDA, 0xDB, 0xDD
_FREE = frozenset({*range(0xE0, 0xF0), 0xFE})  # APPn, COM
_END = b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)

# A code of n bits takes 2 ** -n of the space of codes, in which there is room for one more, of ones alone.
_SPACE = 1 << 16
_SHARES = [_SPACE >> bits for bits in range(1, 17)]
_MOST_BLOCKS = 10  # of a unit in a scan of several components

Tables = frozenset[int]


class _Frame(NamedTuple):
    blocks: tuple[tuple[int, int], ...]  # each component, and how many it has in a unit
    quantization: Tables


class _Scan(NamedTuple):
    components: int
    tables: Tables


def is_sound(image: memoryview) -> bool:
    """Whether the segments of a JPEG, of shape (bytes,), hold what they must, up to its end marker."""
    try:
        return _walk(image)
    except IndexError:  # it ends in a segment
        return False


def _walk(image: memoryview) -> bool:
    huffman: Tables = frozenset()
    quantization: Tables = frozenset()
    frame: _Frame | None = None
    progressive = scanned = False
    at = 2
    while image[at] == 0xFF:
        marker = image[at + 1]
        if marker == 0xFF:  # fills up
            at += 1
            continue
        if marker == _EOI:
            return scanned
        length = image[at + 2] << 8 | image[at + 3]
        body = bytes(image[at + 4 : at + 2 + length])
        if len(body) != length - 2:
            return False
        at += 2 + length
        if marker in _FREE:
            continue
        if marker == _DHT:
            if (tables := _huffman_tables(body)) is None:
                return False
            huffman |= tables
        elif marker == _DQT:
            if (tables := _quantization_tables(body)) is None:
                return False
            quantization |= tables
        elif marker in _SOF:
            if frame is not None or (frame := _frame(body[0], body[5:])) is None:
                return False
            progressive = marker == _PROGRESSIVE
        elif marker == _SOS:
            if frame is None or not frame.quantization <= quantization:
                return False
            scan = _scan(body, frame.blocks, progressive)
            if scan is None or not scan.tables <= huffman:
                return False
            scanned = True
            if not progressive and scan.components == len(frame.blocks) and _END in bytes(image[-64:]):
                return True
            found = _MARKER.search(image, at)
            if found is None:
                return False
            at = found.start()
        elif marker != _DRI or len(body) != 2:
            return False
    return False


@functools.lru_cache(256)
def _quantization_tables(body: bytes) -> Tables | None:
    tables, at = set(), 0
    while at < len(body):
        wide, table = divmod(body[at], 16)
        if wide > 1 or table > 3:
            return None
        tables.add(table)
        at += 1 + 64 * (1 + wide)
    return frozenset(tables) if at == len(body) else None


@functools.lru_cache(256)
def _huffman_tables(body: bytes) -> Tables | None:
    """Their classes (0 for DC, 1 for AC) in the upper four bits, and their numbers in the lower ones."""
    tables, at = set(), 0
    while at + 17 <= len(body):
        table, counts = body[at], body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(counts)]
        at += 17 + sum(counts)
        if table & ~0x13 or len(symbols) > 256 or sum(map(operator.mul, counts, _SHARES)) >= _SPACE:
            return None
        if table < 0x10 and max(symbols, default=0) > 15:
            return None
        tables.add(table)
    return frozenset(tables) if at == len(body) else None


@functools.lru_cache(256)
def _frame(precision: int, body: bytes) -> _Frame | None:
    count = body[0]
    if precision != 8 or count not in (1, 3, 4) or len(body) != 1 + 3 * count:
        return None
    components, sampling, quantization = body[1::3], body[2::3], body[3::3]
    factors = [divmod(s, 16) for s in sampling]
    for sizes in zip(*factors, strict=True):
        # Components of other ratios are not supported by libjpeg.
        if not all(0 < size <= 4 and max(sizes) % size == 0 for size in sizes):
            return None
    if len(set(components)) < count:
        return None
    blocks = [h * v for h, v in factors]
    return _Frame(tuple(zip(components, blocks, strict=True)), frozenset(quantization))


@functools.lru_cache(256)
def _scan(body: bytes, blocks: tuple[tuple[int, int], ...], progressive: bool) -> _Scan | None:
    count = body[0]
    if len(body) != 4 + 2 * count:
        return None
    components, tables = body[1:-3:2], body[2:-3:2]
    first, last, (high, low) = body[-3], body[-2], divmod(body[-1], 16)
    of_scan = [number for component, number in blocks if component in components]
    if not 0 < count == len(set(components)) == len(of_scan) or (count > 1 and sum(of_scan) > _MOST_BLOCKS):
        return None
    dc, ac = {table >> 4 for table in tables}, {0x10 | table & 15 for table in tables}
    if not progressive:
        sound = (first, last, high, low) == (0, 63, 0, 0)
        return _Scan(count, frozenset(dc | ac)) if sound else None
    if low > 13 or (high and high != low + 1) or last > 63:
        return None
    if first == 0:
        return _Scan(count, frozenset() if high else frozenset(dc)) if last == 0 else None
    return _Scan(count, frozenset(ac)) if first <= last and count == 1 else None
