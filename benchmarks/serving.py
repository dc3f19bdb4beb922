"""An HTTP server for the shards of a folder: as slow, and as unreliable, as a benchmark wants it."""

from __future__ import annotations

import multiprocessing
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

PIECE = 1 << 14


class Link:
    """A rate in bytes/s that all connections share."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def send(self, size: int) -> None:
        """Wait until so many bytes have had their time."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._rate
            free = self._free
        time.sleep(max(0.0, free - time.monotonic()))


@dataclass(frozen=True)
class Faults:
    """What goes wrong, at random."""

    unavailable: float = 0.0
    """Share of the requests that are answered with 503."""
    dropped: float = 0.0
    """Of a megabyte sent, the chance that the connection ends there, before all that was announced."""
    stalled: float = 0.0
    """Of a megabyte sent, the chance that nothing follows until the client gives up."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, with ranges, for the files of a folder; training shards share the link."""

    protocol_version = "HTTP/1.1"

    def __init__(self, shards: Path, link: Link, faults: Faults, *args: Any) -> None:
        self._shards, self._link, self._faults = shards, link, faults
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        file, start, size = self._answer()
        if not size:
            return
        # What lies in the kernel's buffers would come at once, however slow the link.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        limited = file.name.startswith("train") and file.suffix == ".tar"
        with file.open("rb") as stream, suppress(ConnectionError):  # a run that has ended
            stream.seek(start)
            while size and (piece := stream.read(min(size, PIECE))):
                if limited:
                    self._link.send(len(piece))
                    chance = random.random() * 1e6 / len(piece)
                    if chance < self._faults.dropped:
                        self.close_connection = True
                        return
                    if chance < self._faults.dropped + self._faults.stalled:
                        self.close_connection = True
                        self.connection.recv(1)  # returns when the client closes
                        return
                self.wfile.write(piece)
                size -= len(piece)

    def _answer(self) -> tuple[Path, int, int]:
        """Send the headers; returns the file, and the first and the number of the bytes to send."""
        file = self._shards / Path(self.path).name
        unavailable = random.random() < self._faults.unavailable
        if unavailable or not file.is_file():
            self.send_response(503 if unavailable else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return file, 0, 0
        size = file.stat().st_size
        start, stop = 0, size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, stop = int(wanted[1]), min(size, int(wanted[2] or size) + 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        return file, start, stop - start

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _serve(shards: Path, rate: float, port: int, faults: Faults, ready: Event) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, shards, Link(rate), faults))
    ready.set()
    server.serve_forever()


@contextmanager
def served(shards: Path, rate: float, port: int, faults: Faults | None = None) -> Iterator[str]:
    """The address of a server in a process of its own, which sends `rate` bytes/s over all connections."""
    ready = multiprocessing.Event()
    arguments = (shards, rate, port, faults or Faults(), ready)
    server = multiprocessing.Process(target=_serve, args=arguments, daemon=True)
    server.start()
    try:
        if not ready.wait(10):
            raise SystemExit(f"error: no server on port {port}: name a free one with --port")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
