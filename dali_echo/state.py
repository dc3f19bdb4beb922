"""Checkpoints of a chain: how they are written, checked and compared.

A checkpoint is a JSON document with a digest: reading one runs nothing, and a damaged one is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

VERSION = 2
"""Of the format. It changes with what a state means, so that an old one is refused."""


def dump(state: Mapping[str, Any]) -> bytes:
    """Write a state of plain values, bytes and NumPy arrays of integers."""
    body = json.dumps(state, default=_encode, separators=(",", ":"))
    return json.dumps({"version": VERSION, "sha256": _digest(body), "state": body}).encode()


def load(document: bytes) -> dict[str, Any]:
    """Read what `dump` wrote.

    Raises:
        ValueError: if it is no such document, is damaged, or is of another version.
    """
    try:
        envelope = json.loads(document)
        version, digest, body = (envelope[key] for key in ("version", "sha256", "state"))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"this is no checkpoint of an echo pipeline, or only a part of one ({error}): use one that "
            f"EchoPipeline.checkpoint() or EchoIterator.state_dict() made"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"the checkpoint has version {version}, and this dali_echo reads version {VERSION}: resume "
            f"with the dali_echo that wrote it"
        )
    if _digest(body) != digest:
        raise ValueError("the checkpoint is damaged (its digest differs): use an earlier one")
    state: dict[str, Any] = json.loads(body, object_hook=_decode)
    return state


def refuse_difference(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse a state of another pipeline.

    Raises:
        ValueError: naming each field that differs, with both values.
    """
    different = differences(saved, present)
    if different:
        raise ValueError(
            "the checkpoint is of another pipeline; make the pipeline as it was, or start afresh. "
            "What differs: "
            + "; ".join(f"{field}: {was!r} in the checkpoint, {now!r} here" for field, was, now in different)
        )


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields that differ, sorted, with the saved and the present value; None where there is none."""
    fields = sorted({*saved, *present})
    return [(f, saved.get(f), present.get(f)) for f in fields if saved.get(f) != present.get(f)]


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _encode(value: Any) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    # Columns of a buffer: as small as their values allow, then compressed.
    small = value.astype(np.min_scalar_type(value.max(initial=0)))
    packed = base64.b64encode(zlib.compress(small.tobytes(), 1)).decode()
    return {"dtype": small.dtype.str, "array": packed}


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() == {"bytes"}:
        return base64.b64decode(value["bytes"])
    if value.keys() == {"dtype", "array"}:
        packed = zlib.decompress(base64.b64decode(value["array"]))
        return np.frombuffer(packed, value["dtype"]).astype(np.int64)
    return value
