from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pipelines.classification import EchoStage
from train import demo
from train.cli import app
from train.demo import Size


@pytest.fixture
def train(tiny, tmp_path, monkeypatch):
    """Runs a short fashion-mnist with further flags; gives its summary and last evaluation."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> dict[str, Any]:
        base = ["--data", str(tiny.train[0].parent), "--batch-size", "16", "--epochs", "1"]
        result = CliRunner().invoke(app, ["fashion-mnist", *base, "--out", "out", *flags])
        assert result.exit_code == 0, result.output
        *_, last = map(json.loads, Path("out/metrics.jsonl").read_text().splitlines())
        return {**last, **json.loads(Path("out/summary.json").read_text())}

    return run


def test_flags_change_the_run(train):
    plain = train()
    assert plain["steps"] == 20
    assert plain["evaluated_on"] == 60
    for flags, key, value in [
        ("--epochs 2", "steps", 40),
        ("--max-steps 3", "steps", 3),
        ("--max-fresh 33", "fresh_examples", 48),
        ("--batch-size 32", "steps", 10),
        ("--target 0.0 --eval-every 64", "fresh_to_target", 64),
        ("--eval-examples 7", "evaluated_on", 7),
        ("--network resnet32 --max-steps 1", "network", "resnet32"),
        ("--device cpu", "device", "cpu"),
        ("--echo-stage decode", "steps", 40),
        ("--echo-stage read --echo-factor 1.5", "steps", 30),
    ]:
        assert train(*flags.split())[key] == value, flags
    for flags in ("--seed 1", "--lr 0.001", "--schedule linear"):
        assert train(*flags.split())["train_loss"] != plain["train_loss"], flags


def test_the_shuffle_buffer_changes_the_run(train):
    small, large = (
        train("--echo-stage", "decode", "--shuffle-buffer", size, "--max-steps", "10")
        for size in ("16", "100")
    )
    assert small["echo"]["shuffle_buffer"] == 16
    assert small["fresh_examples"] < large["fresh_examples"]


@pytest.fixture
def address(tiny):
    """Of a server that has the tiny shards."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tiny.train[0].parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("factor", ["3", "auto"])
def test_training_on_shards_that_a_server_sends(train, address, factor):
    names = "{train-0000,test-0000}"
    run = train("--data", f"{address}/{names}.tar", "--echo-stage", "decode", "--echo-factor", factor)
    assert run["echo"]["factor"] == (3.0 if factor == "3" else factor)
    assert run["evaluated_on"] == 60
    # A pass, and at most what is taken ahead of the last batch.
    assert 320 <= run["fresh_examples"] <= 352


def test_by_default_the_files_are_in_runs(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = str(tiny.train[0].parent)
    result = CliRunner().invoke(app, ["fashion-mnist", "--data", data, "--max-steps", "1"])
    assert "written: runs/fashion-mnist/summary.json" in result.output
    assert (tmp_path / "runs/fashion-mnist/curve.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--echo-factor 2", "--echo-factor 2 needs a stage"),
        ("--echo-stage decode --echo-factor two", "--echo-factor two is not a number, auto or fill"),
        ("--echo-stage decode --echo-factor auto --schedule linear", "add --max-steps"),
        ("--shuffle-buffer 512", "--shuffle-buffer 512 needs a stage"),
        ("--device tpu", "--device tpu is not known"),
        ("--device cuda:99", "--device cuda:99: this machine has"),
        ("--echo-stage crop", "'crop' is not one of"),
        ("--target 90", "--target 90 is not a fraction"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, message):
    result = CliRunner().invoke(app, ["fashion-mnist", *flags.split()], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


def test_an_expected_error_is_one_line(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "train", "cifar10", "--data", str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --data {tmp_path} is neither a folder with shards")
    assert done.stderr.count("\n") == 1


def test_demo(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "QUICK", Size(0.5, max_fresh=1600, seeds=2, eval_every=64))
    flags = ["--quick", "--data", str(tiny.train[0].parent), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["demo", *flags, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "demo.png").exists()
    for name in ("no echo", "echo × 2", "echo × 4"):
        assert f"{name}, seed 1: accuracy" in result.output
    summary = json.loads((tmp_path / "runs/demo/echo-4-seed-1/summary.json").read_text())
    assert summary["echo"]["stage"] == EchoStage.DECODE.value
    assert (summary["echo"]["factor"], summary["seed"]) == (4, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
@pytest.mark.parametrize("stage", ["none", "decode"])
def test_on_a_gpu(train, stage):
    summary = train("--device", "auto", "--echo-stage", stage, "--epochs", "3")
    assert summary["device"] == "cuda"
    assert summary["value"] > 0.5
    assert 0 < summary["busy_fraction"] <= 1
