import contextlib
import gc
import hashlib
import json
import threading
import time

import numpy as np
import pytest
from nvidia.dali import fn
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_echo import echo, pipeline_def, shards
from dali_echo.pytorch import EchoIterator
from dali_echo.shards import patience
from dali_echo.testing import assert_resumes_exactly
from tests.shards.servers import Flaky, nginx

ALL = [shard * 100 + i for shard in range(3) for i in range(20)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.001)


@pytest.fixture
def folder(write_tar, tmp_path):
    """Three shards of 20 samples; the bytes of a sample follow from its number."""
    for shard in range(3):
        write_tar(
            f"{shard}.tar",
            [
                member
                for i in range(20)
                for member in (
                    (f"k/{i}.bin", content(shard * 100 + i)),
                    (f"k/{i}.cls", b"%d" % (shard * 100 + i)),
                )
            ],
        )
    return tmp_path


def content(number):
    return hashlib.sha256(b"%d" % number).digest() * (100 + number)


@pytest.fixture
def flaky(folder):
    server = Flaky(folder)
    yield server
    server.close()


@pytest.fixture
def server(folder, tmp_path_factory):
    with nginx(folder, tmp_path_factory.mktemp("nginx")) as url:
        yield url


@pipeline_def(batch_size=6, num_threads=1, device_id=None, seed=1, enable_checkpointing=True)
def plain(urls, read=None):
    return shards.read(urls, ["bin", "cls"], name="r", **{"initial_fill": 8, **(read or {})})


@pipeline_def(batch_size=6, num_threads=1, device_id=None, seed=1, enable_checkpointing=True)
def marked(urls, read=None):
    data, label = shards.read(urls, ["bin", "cls"], name="r", **{"initial_fill": 8, **(read or {})})
    label, size = echo(label, fn.shapes(data), factor=2)
    return label, size, fn.random.uniform(range=[0.0, 1.0])


def numbers(pipeline, batches=10):
    """The labels of some batches, of samples whose bytes are seen to be right."""
    found = []
    for _ in range(batches):
        data, labels = pipeline.run()
        found += [int(np.array(labels[i])) for i in range(len(labels))]
        for i in range(len(labels)):
            assert np.array(data[i]).tobytes() == content(found[i - len(labels)])
    return found


def all_of(urls, **read):
    """One epoch, which must be whole."""
    found = numbers(plain(urls, read))
    assert sorted(found) == ALL
    return found


@pytest.mark.parametrize("place", ["", "/slow"])
def test_the_same_epochs_from_nginx_as_from_files(server, folder, place):
    urls = f"{server}{place}/{{0..2}}.tar"
    for read in ({"shuffle": False}, {"shuffle": False, "shard_id": 1, "num_shards": 2}):
        local, remote = plain(str(folder / "{0..2}.tar"), read), plain(urls, read)
        assert numbers(remote, 15) == numbers(local, 15)
        assert remote.reader_meta("r") == local.reader_meta("r")
        assert remote.epoch_size() == local.epoch_size()
    pipeline = plain(urls)
    first, second = numbers(pipeline), numbers(pipeline)
    assert sorted(first) == sorted(second) == ALL
    assert first != second
    assert {number // 100 for number in first[:12]} == {0, 1, 2}  # several shards at a time


def test_an_index_beside_the_shard_is_taken_and_cached(flaky, folder, caplog):
    shards.index([folder / f"{i}.tar" for i in range(3)])
    all_of(f"{flaky.url}/{{0..2}}.tar")
    assert "read once" not in caplog.text
    assert sum(path.endswith(".idx") for path, _ in flaky.requests) == 3
    all_of(f"{flaky.url}/{{0..2}}.tar")
    assert sum(path.endswith(".idx") for path, _ in flaky.requests) == 3
    (folder / "0.tar").write_bytes((folder / "1.tar").read_bytes())
    pipeline = plain(f"{flaky.url}/0.tar")
    assert "0.tar: read once" in caplog.text  # the index beside it is of another size
    assert sorted(numbers(pipeline, 10)[:20]) == ALL[20:40]


@pytest.mark.parametrize("read", [{}, {"pad_last_batch": True, "shard_id": 1, "num_shards": 7}])
@pytest.mark.parametrize("definition", [plain, marked])
def test_resumes_exactly(flaky, read, definition):
    urls = f"{flaky.url}/{{0..2}}.tar"
    if definition is plain:
        pipeline = plain(urls, read)
        for _ in range(12):
            state, expected = pipeline.checkpoint(), numbers(pipeline, 1)
            assert numbers(plain(urls, read, checkpoint=state), 1) == expected
        return
    assert_resumes_exactly(
        lambda: EchoIterator(marked(urls, read), ["label", "size", "random"], reader_name="r"), steps=8
    )


@pytest.mark.parametrize("policy", list(LastBatchPolicy))
def test_iterators_measure_the_epoch(flaky, policy):
    urls = f"{flaky.url}/{{0..2}}.tar"
    read = {"pad_last_batch": True, "shard_id": 0, "num_shards": 7}
    lengths = []
    for made in (lambda: marked(str(flaky.root / "{0..2}.tar"), read), lambda: marked(urls, read)):
        batches = DALIGenericIterator(
            made(), ["a", "b", "c"], reader_name="r", last_batch_policy=policy, auto_reset=True
        )
        lengths.append((len(batches), [len(list(batches)) for _ in range(3)]))
    assert lengths[0] == lengths[1]


def test_two_ranks_are_disjoint_and_complete(flaky):
    urls = f"{flaky.url}/{{0..2}}.tar"
    parts = [plain(urls, {"shard_id": rank, "num_shards": 2}) for rank in range(2)]
    for _ in range(3):
        assert sorted(number for part in parts for number in numbers(part, 5)) == ALL


def test_a_server_without_ranges(folder):
    server = Flaky(folder, ranges=False)
    urls = f"{server.url}/{{0..2}}.tar"
    whole = all_of(urls)
    pipeline = plain(urls)
    numbers(pipeline, 4)
    assert numbers(plain(urls, checkpoint=pipeline.checkpoint()), 6) == whole[24:]
    server.close()


@pytest.mark.parametrize(
    "fault",
    [
        lambda number, path, first: ("cut", 20_000) if number % 5 else None,
        lambda number, path, first: 503 if number % 2 else None,
        lambda number, path, first: (429, {"Retry-After": "0"}) if number % 3 else None,
        lambda number, path, first: ("stall", 30_000) if number % 6 == 5 else None,
        lambda number, path, first: ("cut", 0) if number % 3 else None,
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_recovers_with_nothing_lost_or_doubled(folder, fault, ranges):
    expected = all_of([str(folder / f"{i}.tar") for i in range(3)], shuffle=False)
    server = Flaky(folder, ranges)
    server.fault = lambda number, path, first: (
        None if path.endswith("idx") else fault(number, path, first) if ranges or number % 2 else None
    )
    assert all_of(f"{server.url}/{{0..2}}.tar", shuffle=False, timeout=1.0, retries=8) == expected
    server.close()


@pytest.mark.parametrize(
    ("fault", "error", "cause"),
    [
        (404, FileNotFoundError, "answers 404"),
        (403, PermissionError, "answers 403"),
        (503, ConnectionError, "answers 503 .*3 tries"),
        (("stall", 0), TimeoutError, "no byte comes.*timeout"),
        (("cut", 0), ConnectionError, "closed after 0 of"),
        ((302, {"Location": "file:///etc/passwd"}), OSError, "302"),
        ((302, {"Location": "ftp://127.0.0.1/a"}), OSError, "neither http nor https"),
    ],
)
@pytest.mark.parametrize("when", ["at the start", "later"])
def test_an_error_names_url_and_cause_within_the_timeout(flaky, fault, error, cause, when):
    secret = flaky.url.replace("//", "//me:se%20cret@")
    urls = f"{secret}/1.tar?signature=hidden"
    read = {"timeout": 0.3, "retries": 20 if fault == ("stall", 0) else 2}
    pipeline = plain(urls, read) if when == "later" else None
    flaky.fault = lambda number, path, first: fault
    start = time.monotonic()
    with pytest.raises((error, RuntimeError), match=rf"1\.tar.*: .*{cause}") as raised:
        numbers(pipeline or plain(urls, read))
    # Generous, since other things run meanwhile: what matters is that it ends.
    assert time.monotonic() - start < 20
    assert f"{flaky.url}/1.tar?…" in str(raised.value)
    assert not any(word in str(raised.value) for word in ("cret", "hidden", "me:"))


def test_nginx_that_is_down_or_closes(server, tmp_path):
    for place, cause in (("down", "503"), ("closed", "closed|disconnected|without response"), ("x", "404")):
        with pytest.raises(OSError, match=cause):
            plain(f"{server}/{place}/0.tar", {"timeout": 1.0, "retries": 1})


def test_credentials_go_to_their_host_only(folder, flaky):
    other = Flaky(folder)
    flaky.fault = lambda number, path, first: (302, {"Location": f"{other.url}{path}"})
    all_of(f"{flaky.url.replace('//', '//me:secret@')}/{{0..2}}.tar")
    assert all("Authorization" in headers for _, headers in flaky.requests)
    assert not any("Authorization" in headers for _, headers in other.requests)
    other.close()


def test_a_shard_that_changes_meanwhile(flaky, folder):
    pipeline = plain(f"{flaky.url}/0.tar")
    (folder / "0.tar").write_bytes((folder / "1.tar").read_bytes() + bytes(512))
    with pytest.raises((OSError, RuntimeError), match=r"0\.tar: it has changed since it was indexed"):
        numbers(pipeline)


def test_a_missing_component_a_label_and_a_damaged_shard_are_named(flaky, write_tar):
    write_tar("a.tar", [("0.cls", b"1")])
    with pytest.raises(ValueError, match=r"/a\.tar: sample '0' has no component 'bin'"):
        plain(f"{flaky.url}/a.tar")
    write_tar("b.tar", [("0.cls", b"cat"), ("0.bin", b"")])
    with pytest.raises(ValueError, match=r"/b\.tar: sample '0' has the text 'cat'"):
        plain(f"{flaky.url}/b.tar")
    (flaky.root / "c.tar").write_bytes(b"<html>" * 200)
    with pytest.raises(ValueError, match=r"/c\.tar: not a complete"):
        plain(f"{flaky.url}/c.tar")


def test_a_command(folder):
    urls = [f"pipe:cat '{folder}/{i}.tar'" for i in range(3)]
    whole = all_of(urls, allow_pipe=True)
    pipeline = plain(urls, {"allow_pipe": True})
    numbers(pipeline, 4)
    assert numbers(plain(urls, {"allow_pipe": True}, checkpoint=pipeline.checkpoint()), 6) == whole[24:]


def test_a_command_is_run_only_if_allowed(tmp_path):
    with pytest.raises(ValueError, match="allow_pipe=True"):
        plain(f"pipe:touch '{tmp_path}/ran'")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("command", "cause"),
    [("echo it broke >&2; exit 3", "status 3 and said: it broke"), ("sleep 60", "no byte comes")],
)
def test_a_command_that_fails(command, cause):
    with pytest.raises(OSError, match=rf"pipe:.*{cause}"):
        plain(f"pipe:{command}", {"allow_pipe": True, "timeout": 0.3, "retries": 1})


def test_a_command_that_prints_something_else_later(folder):
    read = {"allow_pipe": True}
    command = f"pipe:cat {folder}/0.tar"
    plain(command, read)
    (folder / "0.tar").write_bytes(b"x" * 100_000)
    with pytest.raises((OSError, RuntimeError), match="has changed since it was indexed"):
        numbers(plain(command, read))
    (folder / "0.tar").write_bytes((folder / "1.tar").read_bytes())
    assert sorted(numbers(plain(command, read), 10)[:20]) == ALL[20:40]  # counted anew


def test_no_url_reaches_a_shell(tmp_path, flaky):
    for url in (f"{flaky.url}/$(touch {tmp_path}/ran).tar", f"{flaky.url}/a;touch {tmp_path}/ran"):
        with pytest.raises(OSError, match="404"):
            plain([url])
    assert not (tmp_path / "ran").exists()


def test_the_hub(folder, flaky, monkeypatch):
    for place in ("datasets/me/set/resolve/main", "datasets/me/set/resolve/refs%2Fpr%2F1"):
        (folder / place).mkdir(parents=True)
        for i in range(3):
            (folder / place / f"{i}.tar").write_bytes((folder / f"{i}.tar").read_bytes())
    monkeypatch.setenv("HF_ENDPOINT", flaky.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    all_of("hf://datasets/me/set/{0..2}.tar")
    all_of("hf://datasets/me/set@refs%2Fpr%2F1/{0..2}.tar")
    assert {headers.get("Authorization") for _, headers in flaky.requests} == {"Bearer hf_secret"}
    with pytest.raises(ValueError, match="expected hf://datasets/OWNER/NAME/FILE"):
        plain("hf://datasets/me.tar")


@pytest.mark.parametrize("definition", [plain, marked])
def test_no_thread_is_left_behind(flaky, definition):
    gc.collect()
    before = set(threading.enumerate())
    for _ in range(10):
        pipeline = definition(f"{flaky.url}/{{0..2}}.tar")
        pipeline.run()
        del pipeline
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("dali_echo"):
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_a_pipeline_that_waits_for_a_server_can_be_left(flaky):
    before = set(threading.enumerate())
    pipeline = marked(f"{flaky.url}/{{0..2}}.tar", {"timeout": 200.0})
    pipeline.build()
    flaky.fault = lambda number, path, first: ("stall", 600)

    def run():
        with contextlib.suppress(Exception):
            pipeline.run()

    waits = threading.Thread(target=run, daemon=True)
    asked = len(flaky.requests)
    waits.start()
    while len(flaky.requests) < asked + 3:
        pass
    pipeline._shutdown()
    waits.join(timeout=60)
    assert not waits.is_alive()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("dali_echo-stream"):
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_rates_count_what_came(flaky):
    all_of(f"{flaky.url}/{{0..2}}.tar")
    rate = shards.rates()[flaky.url.partition("//")[2]]
    size = sum((flaky.root / f"{i}.tar").stat().st_size for i in range(3))
    assert rate.bytes >= 2 * size * 0.9  # to index, and to read
    assert rate.seconds > 0
    assert rate.bytes_per_s == rate.bytes / rate.seconds


def test_how_many_shards_are_streamed_at_a_time(flaky):
    urls = f"{flaky.url}/{{0..2}}.tar"
    first = numbers(plain(urls, {"streams": 1, "initial_fill": 1}), 3)
    assert len({number // 100 for number in first[:16]}) == 1
    with pytest.raises(ValueError, match="streams = 0"):
        plain(urls, {"streams": 0})


@pytest.mark.parametrize(("wrong", "value"), [("timeout", 0), ("timeout", -1.0), ("retries", -1)])
def test_patience_that_is_none(flaky, wrong, value):
    with pytest.raises(ValueError, match=f"{wrong} = {value}"):
        plain(f"{flaky.url}/0.tar", {wrong: value})


@pytest.mark.parametrize("url", ["ftp://host/a.tar", "file:///a.tar", "http:///a.tar"])
def test_urls_of_no_known_kind(url):
    with pytest.raises(ValueError, match="no kind of URL that is read"):
        plain(url)


def test_paths_and_urls_in_one_call(flaky, folder):
    with pytest.raises(ValueError, match="with shards elsewhere: one call reads either"):
        plain([f"{flaky.url}/0.tar", folder / "1.tar"])


def test_damaged_images_are_left_out_and_named_by_url(flaky, write_tar, jpeg, tmp_path):
    write_tar("j.tar", [(f"i/{i}.jpg", jpeg(i)[: 300 if i in (3, 7) else None]) for i in range(12)])

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, seed=1)
    def definition(on_error):
        log = tmp_path / "skipped.jsonl"
        options = {"error_log": log, "max_errors": 2} if on_error == "skip" else {}
        encoded = shards.read(f"{flaky.url}/j.tar", "jpg", name="r", on_error=on_error, **options)
        return echo(fn.decoders.image(encoded), factor=1)

    assert definition("skip").reader_meta("r")["epoch_size"] == 12
    pipeline = definition("skip")
    assert sum(len(pipeline.run()[0]) for _ in range(5)) == 20
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert sorted((line["shard"], line["key"]) for line in lines) == [
        (f"{flaky.url}/j.tar", "i/3"),
        (f"{flaky.url}/j.tar", "i/7"),
    ]
    with pytest.raises((ValueError, RuntimeError), match=r"/j\.tar: sample 'i/[37]'"):
        pipeline = definition("raise")
        for _ in range(5):
            pipeline.run()
