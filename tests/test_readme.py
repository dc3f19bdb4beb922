"""The README's examples run, and it names what exists."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from dali_echo import echo
from train.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# The examples are for a machine with a GPU and a large data set: what must differ here, and no more.
SUBSTITUTIONS = {
    "device_id=0": "device_id=None",
    'device="mixed"': 'device="cpu"',
    '"cuda"': '"cpu"',
    "batch_size=256": "batch_size=32",
    "shuffle_buffer=2048": "shuffle_buffer=64",
    "range(epoch, 90)": "range(epoch, EPOCHS)",
    "step % 1000": "step % 3",
}
PATTERN = '"/data/train-{0000..1023}.tar"'


def blocks() -> list[str]:
    """The Python examples in order, each padded so that its lines have the README's line numbers."""
    return [
        "\n" * README.count("\n", 0, match.start(1)) + match[1]
        for match in re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    ]


def adapted(block: str, shards: Sequence[str], epochs: int = 1) -> str:
    last = repr(shards[-1])  # of 50 samples
    for there, here in {**SUBSTITUTIONS, PATTERN: last, "EPOCHS": str(epochs)}.items():
        block = block.replace(there, here)
    return block


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("text", [*SUBSTITUTIONS, PATTERN])
def test_what_is_substituted_is_there(text: str) -> None:
    assert any(text in block for block in blocks())


def test_the_first_example_runs_as_a_script(shards: Sequence[str], tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(adapted(blocks()[0], shards))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # 50 samples, five times each, in batches of 32.
    assert done.stdout.splitlines() == ["torch.Size([32, 3, 224, 224]) torch.Size([32])"] * 8


def test_the_other_examples_go_on_from_the_first(
    shards: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks():
        run(adapted(block, shards), names)


def test_the_loop_that_resumes_ends_where_an_unbroken_one_does(
    shards: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, loop = (block for block in blocks() if "def training" in block or "checkpoint.pt" in block)
    definition = first[: first.index("batches = ")]

    def train(folder: str, epochs: int) -> dict[str, Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        torch.manual_seed(0)
        names = run(adapted(definition, shards), {"__name__": "__main__"})
        return run(adapted(loop, shards, epochs), names)

    unbroken = train("unbroken", epochs=2)
    # One epoch has 8 steps, of which the last one saved is the 6th.
    assert train("broken", epochs=1)["step"] == 8
    resumed = train("broken", epochs=2)
    assert unbroken["step"] == resumed["step"] == 16
    for name, weights in unbroken["model"].state_dict().items():
        assert torch.equal(resumed["model"].state_dict()[name], weights)


def test_the_table_has_every_argument_of_echo() -> None:
    table = README[README.index("| argument of `echo") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [
        name
        for name, parameter in inspect.signature(echo).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]


def test_the_trainer_takes_the_flags_shown() -> None:
    group = typer.main.get_command(app)
    lines = re.findall(r"-m train (\w+-?\w+)( --[^`\n]*)?", README)
    assert lines
    for workload, flags in lines:
        flags = flags.replace("--help", "").replace("FOLDER", "/").replace("--seed S", "--seed 1")
        group.commands[workload].make_context(workload, shlex.split(flags))  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert link.startswith("https://") or (path.parent / link).exists(), link
