"""HTTP servers on loopback: nginx, and one that fails as told."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
_CONF = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log; client_body_temp_path {folder}; proxy_temp_path {folder};
    fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{
        listen unix:{folder}/socket; listen 127.0.0.1:{port}; root {root};
        location /slow/ {{ alias {root}/; limit_rate 300k; }}
        location /down/ {{ return 503; }}
        location /closed/ {{ return 444; }}
    }}
}}
"""


@contextmanager
def nginx(root: Path, folder: Path) -> Iterator[str]:
    """Serve a folder; gives the URL."""
    if NGINX is None:
        pytest.skip("there is no nginx: apt-get install nginx-light")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        port = free.server_port
    (folder / "conf").write_text(_CONF.format(folder=folder, root=root, port=port))
    process = subprocess.Popen([NGINX, "-e", folder / "error.log", "-c", folder / "conf"])
    try:
        while not (folder / "pid").exists():
            assert process.poll() is None, (folder / "error.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Flaky:
    """A server whose `fault(request number, path, first byte)` says what goes wrong.

    It gives None, a status (and headers), ("cut", n): the connection ends after n bytes, or ("stall", n):
    nothing comes after n bytes, until the server ends.
    """

    def __init__(self, root: Path, ranges: bool = True) -> None:
        self.root = root
        self.ranges = ranges
        self.fault: Callable[[int, str, int], object] = lambda number, path, first: None
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(flaky) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None: ...

            def do_GET(self) -> None:
                flaky.requests.append((self.path, dict(self.headers)))
                match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                first = int(match[1]) if match and flaky.ranges else 0
                fault = flaky.fault(len(flaky.requests), self.path, first)
                file = flaky.root / self.path.partition("?")[0].lstrip("/")
                if fault is None and not file.exists():
                    fault = 404
                if isinstance(fault, int):
                    fault = fault, {}
                if isinstance(fault, tuple) and isinstance(fault[0], int):
                    self.send_response(fault[0])
                    for header in fault[1].items():
                        self.send_header(*header)
                    self.end_headers()
                    return
                kind, count = fault if isinstance(fault, tuple) else ("", 1 << 60)
                data = file.read_bytes()
                self.send_response(206 if match and flaky.ranges else 200)
                if match and flaky.ranges:
                    self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(data) - first))
                self.send_header("ETag", f'"{hash(data)}"')
                self.end_headers()
                try:
                    self.wfile.write(data[first : first + count])
                    self.wfile.flush()
                except OSError:
                    return
                if kind == "stall":
                    flaky.over.wait()

        return Handler
