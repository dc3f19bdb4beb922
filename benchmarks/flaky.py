"""Training on two ranks from a server that fails, on shards of which 1 % is damaged, killed now and then.

    python benchmarks/flaky.py FOLDER --minutes 30

FOLDER holds CIFAR-10's shards, train-*.tar and test-*.tar. Copies, in which one image in a hundred is cut
short, are served over HTTP on this machine. The server answers some requests with 503, and drops or stalls
connections on the way. `torchrun` trains on two ranks; every few minutes one rank, picked at random, is
killed for good, and the run resumed. At the end the same training is done without faults and kills, and
compared:

- the same weights, bit for bit: every good sample was used exactly as planned, in the same order;
- skipped.jsonl names exactly the damaged samples that were met, each once;
- the ranks' resident memory, noted in each life, does not grow.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from serving import Faults, served

from dali_echo.shards import index

FAULTS = Faults(unavailable=0.03, dropped=0.03, stalled=0.002)
RATE = 4e6
BATCH = 64


def main(
    data: Annotated[Path, typer.Argument(help="CIFAR-10's shards: train-*.tar and test-*.tar.")],
    minutes: Annotated[float, typer.Option(help="Length of the run that is disturbed.")] = 30,
    out: Annotated[Path, typer.Option(help="Folder for the shards and the runs; made anew.")] = Path(
        "runs/flaky"
    ),
    port: Annotated[int, typer.Option(help="Of the server.")] = 8643,
    seed: Annotated[int, typer.Option(help="Of the damage and the kills.")] = 0,
) -> None:
    random.seed(seed)
    shutil.rmtree(out, ignore_errors=True)
    shards = out / "shards"
    damaged = copy_with_damage(data, shards)
    index(f"{shards}/*.tar")
    print(f"{len(damaged)} damaged images", flush=True)
    with served(shards, RATE, port, FAULTS) as address:
        kills, memory = train_disturbed(out / "disturbed", address, shards, minutes)
    steps = load(out / "disturbed")["run"]["step"]
    print(f"{kills} kills, {steps} steps. Once more, undisturbed", flush=True)
    with served(shards, math.inf, port) as address:
        start(out / "undisturbed", address, shards, steps).wait()
    same = same_weights(*(load(out / run)["learner"]["network"] for run in ("disturbed", "undisturbed")))
    print(f"weights after {steps} steps: {'the same, bit for bit' if same else 'DIFFERENT'}")
    correct = report_skipped(out, damaged)
    report_memory(memory)
    raise typer.Exit(0 if same and correct else 1)


def copy_with_damage(data: Path, shards: Path) -> set[tuple[str, str]]:
    """Copy shards, cutting an image in a hundred in half; returns the shard and the key of each."""
    shards.mkdir(parents=True)
    damaged = set()
    for file in sorted(data.glob("*-*.tar")):
        with tarfile.open(file) as tar, tarfile.open(shards / file.name, "w") as copy:
            for member in tar:
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                stem, _, extension = member.name.partition(".")
                if extension != "cls" and file.name.startswith("train") and random.random() < 0.01:
                    content = content[: len(content) // 2]
                    damaged.add((file.name, stem))
                member.size = len(content)
                copy.addfile(member, io.BytesIO(content))
    return damaged


def start(out: Path, address: str, shards: Path, steps: int) -> subprocess.Popen[bytes]:
    """Train, or go on, up to a number of steps."""
    names = ",".join(file.stem for file in sorted(shards.glob("*.tar")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "train", "cifar10", "--data", f"{address}/{{{names}}}.tar", "--on-error", "skip"]
    command += ["--echo-stage", "decode", "--echo-factor", "2.5", "--batch-size", str(BATCH)]
    command += ["--epochs", "1000", "--max-steps", str(steps), "--eval-every", "20000"]
    command += ["--eval-examples", "500", "--checkpoint-every", "20", "--resume", "--out", str(out)]
    log = (out.parent / f"{out.name}.log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def train_disturbed(out: Path, address: str, shards: Path, minutes: float) -> tuple[int, list[list[float]]]:
    """Kill a rank again and again; returns how often, and the memory of the ranks in each life."""
    end = time.monotonic() + 60 * minutes
    kills, memory = 0, []
    while time.monotonic() < end:
        run = start(out, address, shards, 10**6)
        memory.append(watch(run, out / "checkpoint.pt", random.uniform(30, 240)))
        ranks = list(ranks_of(run.pid))
        if ranks:
            os.kill(random.choice(ranks), signal.SIGKILL)
            kills += 1
        try:
            run.wait(60)  # torchrun ends the other one
        except subprocess.TimeoutExpired:
            print("the other rank did not end within 60 s of the kill", flush=True)
            os.killpg(run.pid, signal.SIGKILL)
        print(f"kill {kills}: step {load(out)['run']['step']}, {memory[-1][-1]:.0f} MB a rank", flush=True)
    start(out, address, shards, load(out)["run"]["step"] + 20).wait()
    return kills, memory


def watch(run: subprocess.Popen[bytes], checkpoint: Path, seconds: float) -> list[float]:
    """Mean resident memory of the ranks in MB, until so long after the first checkpoint of this life."""
    born, end = time.time(), math.inf
    noted = []
    while time.time() < end and run.poll() is None:
        time.sleep(2)
        if end == math.inf and checkpoint.exists() and checkpoint.stat().st_mtime > born:
            end = time.time() + seconds
        sizes = [resident(pid) for pid in ranks_of(run.pid)]
        if sizes:
            noted.append(fmean(sizes))
    return noted


def ranks_of(pid: int) -> Iterator[int]:
    """The processes that torchrun started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        if b"cifar10" in Path(f"/proc/{child}/cmdline").read_bytes():
            yield int(child)


def resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def load(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def report_skipped(out: Path, damaged: set[tuple[str, str]]) -> bool:
    """Whether exactly the damaged samples are named, each once, by both runs."""
    named = {}
    for run in ("disturbed", "undisturbed"):
        lines = [json.loads(line) for line in (out / run / "skipped.jsonl").open()]
        found = [(Path(line["shard"]).name, line["key"]) for line in lines]
        named[run] = set(found)
        print(f"{run}: {len(found)} lines in skipped.jsonl, {len(set(found) & damaged)} of them damaged")
        if len(set(found)) < len(found) or not set(found) <= damaged:
            return False
    return named["undisturbed"] <= named["disturbed"]


def report_memory(memory: list[list[float]]) -> None:
    print("MB a rank after 30 s and at the end of each life:")
    print(", ".join(f"{life[15]:.0f} and {life[-1]:.0f}" for life in memory if len(life) > 15))


if __name__ == "__main__":
    typer.run(main)
