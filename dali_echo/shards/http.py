"""Files on HTTP servers, read from any byte on."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import os
import re
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from dali_echo.shards.sources import Opened, TransientError

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class HttpSource:
    """A file at an `http://` or `https://` URL. Credentials in it are sent, and never shown.

    Attributes:
        url: where to ask.
        shown: how messages name it.
        token: sent as a bearer's to the URL's own host only.
    """

    url: str = field(repr=False)
    shown: str
    token: str | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        """Whose rate it counts for."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def open(self, start: int, timeout: float) -> Opened:
        """Ask for the bytes from `start` on; a server that cannot answers with all of them.

        Raises:
            TransientError: if it may work next time.
            OSError: if it will not.
        """
        try:
            response = _opener().open(self._request(start), timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error, start) from None
        except urllib.error.URLError as error:
            raise TransientError(_cause(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(_cause(error)) from None
        return self._opened(response, start)

    def _request(self, start: int) -> urllib.request.Request:
        parts = urlsplit(self.url)
        # What is escaped stays so; what must be gets so.
        path, query = (quote(part, safe="%/:=&?~#+!$,;'@()*[]") for part in (parts.path, parts.query))
        host = parts.netloc.rpartition("@")[2]
        request = urllib.request.Request(f"{parts.scheme}://{host}{path or '/'}{'?' * bool(query)}{query}")
        request.add_header("Range", f"bytes={start}-")
        request.add_header("Accept-Encoding", "identity")
        request.add_header("User-Agent", "dali_echo")
        # Headers of this kind are not sent on to where a redirect leads.
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            encoded = base64.b64encode(pair.encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {encoded}")
        elif self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        return request

    def _refusal(self, error: urllib.error.HTTPError, start: int) -> Exception:
        said = f"the server answers {error.code} {error.reason}"
        if error.code in _AGAIN:
            seconds = error.headers.get("Retry-After", "")
            return TransientError(said, float(seconds) if seconds.isdecimal() else 0.0)
        if error.code in (404, 410):
            return FileNotFoundError(f"{self.shown}: {said}: check the URL and the range in its braces")
        if error.code in (401, 403):
            return PermissionError(f"{self.shown}: {said}: check the credentials and who may read it")
        if error.code == 416:
            return OSError(f"{self.shown}: {said}: the file ends before byte {start + 1}, or is empty")
        return OSError(f"{self.shown}: {said}")

    def _opened(self, response: http.client.HTTPResponse, start: int) -> Opened:
        headers = response.headers
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            response.close()
            raise OSError(f"{self.shown}: the server compresses it ({encoding}): have it sent as it is")
        first, size = 0, _decimal(headers.get("Content-Length"))
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
            if match is None or int(match[1]) != start:
                response.close()
                raise OSError(
                    f"{self.shown}: asked for the bytes from {start} on, the server sends "
                    f"{headers.get('Content-Range')!r}"
                )
            first, size = start, _decimal(match[2])
        return Opened(
            file=response,
            first=first,
            size=size,
            tag=headers.get("ETag") or headers.get("Last-Modified"),
            ranges=response.status == 206,
            interrupt=functools.partial(_interrupt, os.dup(response.fileno())),
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Follow to http and https, not to what else urllib would open."""
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.HTTPError(
                req.full_url, code, f"{msg}, to a URL that is neither http nor https", headers, fp
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)


def _cause(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no byte comes"
    return f"{error}" or type(error).__name__


def _decimal(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _interrupt(descriptor: int) -> None:
    """End a connection so that whoever waits for its bytes wakes up."""
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
