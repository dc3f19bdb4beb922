"""What a command prints."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field

from dali_echo.shards.sources import Opened

_SECRETS = (
    (re.compile(r"://[^/\s@]*@"), "://"),
    (re.compile(r"\?[^\s'\"|;]*"), "?…"),
    (re.compile(r"(?i)((?:authorization|bearer|token|password|secret|key)\s*[:= ]\s*)[^\s'\"]+"), r"\1…"),
)


def without_secrets(text: str) -> str:
    """A command without users, queries of URLs, tokens and passwords, as far as they look like these."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


@dataclass(frozen=True)
class PipeSource:
    """The output of a shell command, which begins anew whenever it is opened."""

    command: str = field(repr=False)

    host = "pipe:"

    @property
    def shown(self) -> str:
        """How messages name it."""
        return f"pipe:{without_secrets(self.command)}"

    def open(self, start: int, timeout: float) -> Opened:
        """Run the command."""
        output = _Output(self.command, timeout)
        return Opened(output, first=0, size=None, tag=None, ranges=False, interrupt=output.kill)


class _Output:
    def __init__(self, command: str, timeout: float) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # A group of its own, so that all of a pipeline of commands can be ended.
        self._process = subprocess.Popen(
            command, shell=True, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )

    def read(self, size: int) -> bytes:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], self._timeout)[0]:
            raise TimeoutError
        data = os.read(output.fileno(), size)
        if not data and self._process.wait(self._timeout):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            said = next((line for line in reversed(lines) if line.strip()), "nothing")
            raise OSError(
                f"the command ended with status {self._process.returncode} and said: {without_secrets(said)}"
            )
        return data

    def close(self) -> None:
        self.kill()
        self._process.communicate()
        self._errors.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
