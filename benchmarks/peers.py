"""Echo after decode beside other loaders on the same photos and cores: speed, CPU time and memory.

    python benchmarks/peers.py 'FOLDER/train-{0000..0003}.tar'

All decode JPEGs, echo them e times through a shuffle buffer, cut a random resized crop of 224 × 224, flip
half of them, and return batches of 64, normalised float32 CHW unless the name says uint8. How they shrink
is in the name: "antialiased" is bilinear with a filter as wide as the scale asks for, "area" averages whole
pixels. Each peer is a short script in benchmarks/peers/. The rivals' environments, one for each requirements
file, are made on the first run (torch, TensorFlow: several gigabytes). Ours runs in the environment of this
script.

In each round every peer runs once in a new process, for all e, in an order that changes. The tables show
medians of the rounds, with their range. Where others use the cores too, neither images/s nor CPU time can be
compared across runs, and within one run only roughly: look at the load that the last line reports.

The buffers are not equal: dali_echo holds 256 live photos, the rivals 256 uses, which are fewer photos the
larger e is. Their memory is lower for that reason too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from braceexpand import braceexpand
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent / "peers"
CACHE = Path.home() / ".cache/dali_echo/peers"
FACTORS = (1, 2, 4, 8)
MEASURES = {
    "images_per_s": ("images/s", "{:,.0f}"),
    "cpu_ms": ("CPU time for an image, ms", "{:.2f}"),
    "peak_mb": ("peak memory, MB (resident; what processes share counts in each)", "{:,.0f}"),
}
Result = dict[str, float]


@dataclass(frozen=True)
class Peer:
    name: str
    script: str
    environment: str | None
    """Of requirements-….txt; None for the interpreter that runs this."""
    variables: dict[str, str] = field(default_factory=dict)


PEERS = (
    Peer("webdataset, Pillow (antialiased)", "wds.py", "torch", {"DECODE": "pillow"}),
    Peer("webdataset, torchvision (antialiased)", "wds.py", "torch", {"DECODE": "torchvision"}),
    Peer("torchdata.nodes, torchvision (antialiased)", "nodes.py", "torch"),
    Peer("tf.data (area)", "tfdata.py", "tensorflow"),
    Peer("OpenCV in threads (area)", "opencv.py", "opencv"),
    Peer("dali_echo, DALI's resize (antialiased)", "ours.py", None, {"VARIANT": "dali"}),
    Peer("dali_echo, recipe in float32 (antialiased)", "ours.py", None, {"VARIANT": "float32"}),
    Peer("dali_echo, recipe in uint8 (antialiased)", "ours.py", None, {"VARIANT": "uint8"}),
)


def python_of(environment: str | None, cache: Path) -> str:
    """The interpreter of an environment, which is made if it is missing or has other requirements."""
    if environment is None:
        return sys.executable
    requirements = HERE / f"requirements-{environment}.txt"
    folder = cache / environment
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    if not done.exists() or done.read_text() != requirements.read_text():
        print(f"making {folder} from {requirements.name}, which takes minutes", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        done.write_text(requirements.read_text())
    return str(python)


@contextmanager
def process_of(peer: Peer, python: str, shards: list[str], cache: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [python, str(HERE / peer.script), *shards],
        env={**os.environ, **peer.variables, "PEER_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # A full pipe would stop the process.
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        yield process
    except (BrokenPipeError, json.JSONDecodeError) as error:
        reader.join(5)
        raise RuntimeError(f"{peer.name} failed:\n{''.join(errors[-30:])}") from error
    finally:
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def measure(process: subprocess.Popen[str], factor: int, seconds: float) -> Result:
    answer(process, json.dumps({"factor": factor, "seconds": seconds}))
    before, peak, stopped = cpu_s(process.pid), [resident(process.pid)], threading.Event()

    def watch() -> None:
        while not stopped.wait(0.1):
            peak[0] = max(peak[0], resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = json.loads(answer(process, "go"))
    finally:
        stopped.set()
        watcher.join()
    return {
        "images_per_s": result["images"] / result["seconds"],
        "cpu_ms": 1e3 * (cpu_s(process.pid) - before) / result["images"],
        "peak_mb": peak[0] / 1e6,
    }


def answer(process: subprocess.Popen[str], request: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    return line or "the process has ended"


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    pids = [pid]
    for parent in pids:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            pids.extend(map(int, read(file).split()))
    return pids


def cpu_s(pid: int) -> float:
    """User and system time of a process, of those that descend from it, and of those that have ended."""
    fields = [read(f"/proc/{p}/stat").rpartition(")")[2].split() for p in tree(pid)]
    return sum(float(value) for f in fields for value in f[11:15]) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    pages = [read(f"/proc/{p}/statm").split() for p in tree(pid)]
    return sum(int(p[1]) for p in pages if p) * os.sysconf("SC_PAGE_SIZE")


def read(path: Path | str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended
        return ""


def main(
    urls: Annotated[list[str], typer.Argument(help="Local shards of JPEGs, braces allowed.")],
    rounds: int = 3,
    seconds: Annotated[float, typer.Option(help="Length of one measurement.")] = 1.5,
    cores: Annotated[int, typer.Option(help="How many cores all share.")] = 2,
    only: Annotated[str, typer.Option(help="Run the peers whose name holds this.")] = "",
    cache: Annotated[Path, typer.Option(help="Folder for environments and records.")] = CACHE,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every round here.")] = None,
) -> None:
    peers = [peer for peer in PEERS if only in peer.name]
    shards = [str(Path(shard).resolve()) for url in urls for shard in braceexpand(url)]
    cache.mkdir(parents=True, exist_ok=True)
    pythons = {peer.name: python_of(peer.environment, cache) for peer in peers}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    load = os.getloadavg()[0]
    results: dict[str, dict[int, list[Result]]] = {p.name: {e: [] for e in FACTORS} for p in peers}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=rounds * len(peers) * len(FACTORS))
        for i in range(rounds):
            for peer in peers[i % len(peers) :] + peers[: i % len(peers)]:
                with process_of(peer, pythons[peer.name], shards, cache) as process:
                    for e in FACTORS:
                        progress.update(task, description=f"round {i + 1}: {peer.name}, e = {e}")
                        results[peer.name][e].append(measure(process, e, seconds))
                        progress.advance(task)
            if json_file:  # each round, so that a run cut short keeps its finished ones
                record = {"cores": cores, "seconds": seconds, "load": load, "results": results}
                json_file.write_text(json.dumps(record, indent=1))
    report(results, rounds)
    print(f"{cores} cores; load before the run {load:.1f}, after it {os.getloadavg()[0]:.1f}")


def report(results: dict[str, dict[int, list[Result]]], rounds: int) -> None:
    console = Console(width=max(120, Console().width))
    for measure, (title, form) in MEASURES.items():
        table = Table(title=f"{title}: median of {rounds} rounds (range)")
        table.add_column("")
        for e in FACTORS:
            table.add_column(f"e = {e}", justify="right")
        for name, by_factor in results.items():
            values = [[r[measure] for r in by_factor[e]] for e in FACTORS]
            table.add_row(name, *(spread(v, form) for v in values))
        console.print(table)
    console.print("images/s over the fastest antialiased peer / over the fastest peer, from the medians:")
    rivals = [name for name in results if not name.startswith("dali_echo")]
    for name in results:
        if name in rivals or not rivals:
            continue
        ratios = []
        for e in FACTORS:
            best, antialiased = (
                max((median(results[r][e]) for r in rivals if kind in r), default=float("nan"))
                for kind in ("", "antialiased")
            )
            mine = median(results[name][e])
            ratios.append(f"e = {e}: {mine / antialiased:.2f} / {mine / best:.2f}")
        console.print(f"  {name}: {', '.join(ratios)}")


def median(results: list[Result]) -> float:
    return statistics.median(r["images_per_s"] for r in results)


def spread(values: list[float], form: str) -> str:
    low, mid, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{mid} ({low} – {high})"


if __name__ == "__main__":
    typer.run(main)
