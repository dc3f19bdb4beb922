"""The bytes of a source, whatever happens on the way."""

from __future__ import annotations

import http.client
import logging
import threading

from dali_echo.shards import rates
from dali_echo.shards.patience import Patience, Tries
from dali_echo.shards.sources import Opened, Source, TransientError

log = logging.getLogger("dali_echo.shards")

_CHUNK = 1 << 18
_SKIP = 1 << 20  # a shorter way forward is read and dropped: a new request costs more


class ByteStream:
    """Reads a source from any byte on; begins again where a connection broke off.

    Args:
        source: what to read.
        patience: how long to try.
        size: what the source must have, if known,
        tag: and its tag: another one is an error.
    """

    def __init__(
        self, source: Source, patience: Patience, size: int | None = None, tag: str | None = None
    ) -> None:
        self._source = source
        self._patience = patience
        self.size, self.tag, self.ranges = size, tag, True
        self._known = size is not None or tag is not None
        self._opened: Opened | None = None
        self._at = 0
        self._lock = threading.Lock()

    def read(self, start: int, size: int) -> bytes:
        """The bytes from `start` on, fewer only at the end of the source.

        Raises:
            OSError: naming the source and the cause, when the patience is used up or no try can help.
        """
        parts: list[bytes] = []
        end = start + size
        tries = Tries(self._patience)
        while start < end and not (self.size is not None and start >= self.size):
            try:
                data = self._some(start, end - start, tries)
            except TransientError as error:
                self.close()
                if self._patience.stop.is_set():
                    raise InterruptedError(f"{self._source.shown}: not read on") from None
                given_up = tries.again(error.wait_s)
                if given_up:
                    kind = TimeoutError if "timeout" in given_up else ConnectionError
                    raise kind(f"{self._source.shown}: {error} at byte {start}; {given_up}") from None
                log.info("%s: %s at byte %d; trying again", self._source.shown, error, start)
                continue
            if not data:
                break
            parts.append(data)
            start += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def open(self) -> None:
        """Find out the source's size, tag and whether it has ranges."""
        self.read(0, 1)

    def read_all(self) -> bytes:
        """All bytes."""
        parts: list[bytes] = []
        while data := self.read(sum(map(len, parts)), _SKIP):
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        """Give up the connection."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.interrupt()
            opened.file.close()

    def interrupt(self) -> None:
        """End a `read` on another thread, once the patience's `stop` is set."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.interrupt()

    def _some(self, start: int, size: int, tries: Tries) -> bytes:
        """Some of the bytes wanted; none at the end."""
        if self._opened is not None and not self._at <= start <= self._at + _SKIP:
            self.close()
        with rates.waiting(self._source.host):
            if self._opened is None:
                self._open(start, tries)
            while self._at < start:
                if not self._receive(min(_CHUNK, start - self._at), tries):
                    return b""
            return self._receive(min(_CHUNK, size), tries)

    def _open(self, start: int, tries: Tries) -> None:
        opened = self._source.open(start, tries.allowed_s)
        if self._known and (opened.size, opened.tag) != (self.size, self.tag):
            opened.interrupt()
            opened.file.close()
            raise OSError(
                f"{self._source.shown}: it has changed since it was indexed (size {self.size} and tag "
                f"{self.tag} then, {opened.size} and {opened.tag} now): start again"
            )
        self.size, self.tag, self.ranges, self._known = opened.size, opened.tag, opened.ranges, True
        self._at = opened.first
        with self._lock:
            self._opened = opened
        if self._patience.stop.is_set():
            raise TransientError("not wanted any more")

    def _receive(self, size: int, tries: Tries) -> bytes:
        opened = self._opened
        if opened is None:
            raise TransientError("not wanted any more")
        try:
            data = opened.file.read(size)
        except TimeoutError:
            raise TransientError("no byte comes") from None
        except http.client.IncompleteRead as error:
            if not error.partial:
                raise TransientError("the connection was closed") from None
            data = error.partial
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            # A connection that was ended on another thread shows as any of these.
            raise TransientError(str(error) or type(error).__name__) from None
        if not data and self.size is not None and self._at < self.size:
            raise TransientError(f"the connection was closed after {self._at} of {self.size} bytes")
        rates.received(self._source.host, len(data))
        self._at += len(data)
        if data:
            tries.restart()
        return data
