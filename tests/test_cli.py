import io
import json
import os
import subprocess
import sys
import tarfile

import pytest
from PIL import Image
from typer.testing import CliRunner

from dali_echo.cli import app

PLAN = ["plan", "--batch-size", "100", "--step-ms", "100"]
NETWORK = [*PLAN, "--samples-per-s", "166.7"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def images(tmp_path):
    for name in ("ant", "cat"):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (20, 20), (60 * i, 0, 0)).save(folder / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def shard(images, tmp_path):
    assert call("shards", "write", images, "a-%d.tar")[0] == 0
    return tmp_path / "a-0.tar"


def call(*arguments):
    """The exit code, and what goes to standard output and standard error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def python(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.check_output([sys.executable, *arguments], text=True, env=environment)


def test_write_info_verify_index(images, tmp_path):
    code, out, _ = call("shards", "write", images, "out/a-%d.tar", "--max-samples", 5, "--json")
    assert code == 0
    written = json.loads(out)
    assert written == {"shards": ["out/a-0.tar", "out/a-1.tar"], "samples": 8}

    code, out, _ = call("shards", "info", "out/a-{0..1}.tar", "--json", "--preview", "sheet.png")
    assert code == 0
    info = json.loads(out)
    assert info["samples_per_shard"] == {"least": 3, "median": 4, "greatest": 5, "total": 8}
    assert info["samples"] == {"out/a-0.tar": 5, "out/a-1.tar": 3}
    assert info["components"] == {"cls": 8, "png": 8}
    assert info["classes"] == {"cls": {"0": 4, "1": 4}}
    assert Image.open("sheet.png").size == (8 * 128, 142)
    code, out, _ = call("shards", "info", *written["shards"])
    assert "8 samples in 2 shard(s) of 3 to 5" in out
    assert "cls: 2 classes from 0 to 1, of 4 to 4 samples" in out

    assert call("shards", "verify", *written["shards"], "--decode", "--json")[:2] == (
        0,
        '{\n  "findings": []\n}\n',
    )
    assert call("shards", "verify", *written["shards"])[:2] == (0, "Nothing wrong.\n")

    code, out, _ = call("shards", "index", *written["shards"])
    assert code == 0
    assert [line.endswith(".idx") for line in out.splitlines()] == [True, True]
    code, out, _ = call("shards", "index", *written["shards"], "--json")
    assert [*json.loads(out)["indexes"]] == written["shards"]


def test_findings_end_with_1(shard):
    with tarfile.open(shard, "a") as tar:
        for i in range(12):
            info = tarfile.TarInfo(f"dog/[{i}].png")
            info.size = 6
            tar.addfile(info, io.BytesIO(b"<html>"))
    code, out, _ = call("shards", "verify", shard, "--decode", "--ext", "png", "--ext", "cls", "--json")
    assert code == 1
    findings = json.loads(out)["findings"]
    assert [(f["shard"], f["key"], f["problem"]) for f in findings] == [
        (str(shard), f"dog/[{i}]", problem) for problem in ("missing component", "image") for i in range(12)
    ]
    code, out, _ = call("shards", "verify", shard, "--decode", "--ext", "png", "--ext", "cls")
    assert code == 1
    assert f"image: {shard}: sample 'dog/[9]' 'png': DALI does not decode it" in out
    assert "'dog/[10]'" not in out
    assert "image: … and 2 more\n" in out
    assert "The first 10 of each are listed" in out


def test_a_damaged_shard_does_not_keep_others_from_their_index(shard, tmp_path):
    damaged = tmp_path / "b.tar"
    damaged.write_bytes(shard.read_bytes()[:700])
    code, out, err = call("shards", "index", damaged, shard)
    assert code == 1
    assert len(out.splitlines()) == 1
    assert f"{damaged}: not a complete" in err
    code, out, _ = call("shards", "index", damaged, shard, "--json")
    assert code == 1
    assert [*json.loads(out)["damaged"]] == [str(damaged)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shards", "index", "no.tar"], "1 of 1 shards do not exist: no.tar"),
        (["shards", "verify", "no.tar"], "1 of 1 shards do not exist: no.tar"),
        (["shards", "verify", "."], "is a folder"),
        (["shards", "info", "s3://bucket/a.tar"], "only local shards"),
        (["shards", "write", ".", "a-%d.tar"], "has no sub-folders"),
        (["shards", "write", "none", "a-%d.tar"], "No such file"),
        (["shards", "write"], "Missing argument"),
        (PLAN, "missing: samples_per_s"),
        ([*PLAN, "--bandwidth", "1GB"], "bandwidth needs encoded_bytes"),
        ([*PLAN, "--bandwidth", "much", "--encoded-bytes", "1kB"], "bandwidth = 'much'"),
        ([*NETWORK, "--ranks", "1,x"], "ranks = '1,x'"),
        ([*NETWORK, "--ranks", "0"], "ranks = '0'"),
        ([*NETWORK, "--decode-ms", "-1"], "decode_ms = -1.0"),
        ([*NETWORK, "--plot", "plan.what"], "plan.what|what"),
        (["plan", "none.toml"], "none.toml"),
        (["nothing"], "No such command"),
    ],
)
def test_usage_errors_end_with_2(arguments, message):
    code, out, err = call(*arguments)
    assert code == 2
    assert out == ""
    assert any(part in err for part in message.split("|"))


def test_plan():
    code, out, _ = call(*NETWORK)
    assert code == 0
    assert "The storage is the bottleneck (R = 6.0): set the mark after read, with factor=5" in out
    code, out, _ = call(*NETWORK, "--json")
    (plan,) = json.loads(out)
    assert plan["best"]["mark"] == "read"
    assert plan["bottleneck"] == "the storage"
    assert plan["work"]["step"] == pytest.approx(0.1)
    assert [option["mark"] for option in plan["options"]] == ["read", "decode", "augment"]


def test_plan_says_plainly_that_echo_would_not_help():
    code, out, _ = call(*PLAN, "--samples-per-s", "2500")
    assert code == 0
    assert "Echo would not help here: the accelerator is the bottleneck (R = 0.4)." in out


def test_plan_over_ranks():
    arguments = [*PLAN, "--bandwidth", "1GB", "--encoded-bytes", "100kB", "--ranks", "1,64,4096"]
    arguments += ["--dataset-samples", "1.2e6", "--epochs", "90", "--plot", "plan.png"]
    code, out, _ = call(*arguments)
    assert code == 0
    assert "10,800 → 1,800" in out  # GB at 64 ranks, e = 6
    assert Image.open("plan.png").format == "PNG"
    code, out, _ = call(*arguments, "--json")
    assert [plan["ranks"] for plan in json.loads(out)] == [1, 64, 4096]
    assert call(*NETWORK, "--plot", "one.svg")[0] == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "plan.toml",
            'batch_size = 100\nstep_ms = 100\nbandwidth = "1GB"\nencoded_bytes = 100_000\nranks = [1, 64]\n',
        ),
        ("plan.json", '{"batch_size": 100, "step_ms": 100, "samples_per_s": 10000, "ranks": "1,64"}'),
    ],
)
def test_plan_from_a_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    _, out, _ = call("plan", name, "--json")
    assert [plan["options"][0]["R"] for plan in json.loads(out)] == pytest.approx([0.1, 6.4])
    _, out, _ = call("plan", name, "--step-ms", "10", "--json")
    assert [plan["options"][0]["R"] for plan in json.loads(out)] == pytest.approx([1, 64])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = 1\nbatchsize = 1", "unknown batchsize. Known are augment_ms"),
        ("batch_size: 1", "Expected TOML"),
        ('batch_size = "1"', "batch_size = '1'"),
        ("batch_size = true", "batch_size = True: give a number"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, text, message):
    (tmp_path / "plan.toml").write_text(text)
    code, _, err = call("plan", "plan.toml")
    assert code == 2
    assert message in err


def test_the_module_runs_as_a_command():
    assert "Training becomes at most" in python("-m", "dali_echo", *NETWORK)


def test_importing_the_package_does_not_load_what_only_commands_need():
    code = "import sys, dali_echo; print({'matplotlib', 'typer', 'rich'} & set(sys.modules))"
    assert python("-c", code) == "set()\n"
