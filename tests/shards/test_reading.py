import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types

import dali_echo
from dali_echo import echo, shards
from dali_echo.pytorch import EchoIterator


def pairs(jpeg, numbers):
    return [
        member
        for number in numbers
        for member in ((f"{number:04d}.jpg", jpeg(number)), (f"{number:04d}.cls", b"%d" % number))
    ]


def run(read, *, batches=1, **options):
    """Run a definition made of `read` and give its outputs as lists of arrays, one per sample."""
    options = {"batch_size": 4, "num_threads": 1, "device_id": None, "seed": 1, **options}
    pipeline = pipeline_def(read)(**options)
    results = [pipeline.run() for _ in range(batches)]
    return [
        [np.array(output.at(i)) for batch in results for output in [batch[k]] for i in range(len(output))]
        for k in range(len(results[0]))
    ]


def numbers(path, *, count, batch_size=None, seed=1, **options):
    """The labels that `read` gives in the first `count` samples."""
    (labels,) = run(
        lambda: shards.read(path, "cls", name="r", **options),
        batch_size=batch_size or count,
        batches=1 if batch_size is None else -(-count // batch_size),
        seed=seed,
    )
    return [int(label) for label in labels][:count]


LONG = "/".join(["a long folder"] * 10) + "/"


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("folder", ["", "with spaces/é日本/", LONG])
@pytest.mark.parametrize("adjacent", [True, False])
def test_pixels_and_labels(write_tar, jpeg, identify, format, folder, adjacent):
    members = [(folder + name, data) for name, data in pairs(jpeg, [3, 141, 59, 26])]
    if not adjacent:
        members.sort(key=lambda member: member[0].endswith("cls"))
    path = write_tar("a.tar", members, format)

    def definition():
        jpegs, labels = shards.read(path, ["jpg", "cls"], name="train", shuffle=False)
        return fn.decoders.image(jpegs), labels

    images, labels = run(definition)
    assert [identify(image) for image in images] == [3, 141, 59, 26]
    assert [int(label) for label in labels] == [3, 141, 59, 26]


def test_labels_are_int64_numbers_whatever_their_length(write_tar):
    texts = [b"7", b"123456789012", b" -12\r\n", b"+9223372036854775807\n"]
    path = write_tar("a.tar", [(f"{i}.left.cls", text) for i, text in enumerate(texts)])

    def definition():
        return shards.read(path, "left.cls", name="r", shuffle=False)

    (batch,) = pipeline_def(definition)(batch_size=4, num_threads=1, device_id=None).run()
    assert batch.dtype == types.DALIDataType.INT64
    assert batch.as_tensor().shape() == [4]
    assert np.array(batch.as_tensor()).tolist() == [7, 123456789012, -12, 9223372036854775807]


def test_other_components_are_bytes(write_tar):
    path = write_tar("a.tar", [("a.txt", b"caf\xc3\xa9"), ("a.cls.bin", b"12"), ("a.empty", b"")])
    outputs = run(lambda: shards.read(path, ["txt", "cls.bin", "empty"], name="r"), batch_size=1)
    assert [(output[0].dtype, output[0].tobytes()) for output in outputs] == [
        (np.uint8, b"caf\xc3\xa9"),
        (np.uint8, b"12"),
        (np.uint8, b""),
    ]


@pytest.mark.parametrize("ext", ["jpg;jpeg", ".jpg; .JPEG", "png;jpeg;jpg"])
def test_alternatives_in_any_case_and_with_dots(write_tar, ext):
    path = write_tar("a.tar", [("0.jpg", b"0"), ("1.jpeg", b"1"), ("2.JPG", b"2"), ("3.Jpeg", b"3")])
    (outputs,) = run(lambda: shards.read(path, [ext], name="r", shuffle=False))
    assert [output.tobytes() for output in outputs] == [b"0", b"1", b"2", b"3"]


def test_extensions_with_spaces(write_tar):
    path = write_tar("a.tar", [("0.left eye.jpg", b"0")])
    (outputs,) = run(lambda: shards.read(path, "left eye.jpg", name="r"), batch_size=1)
    assert outputs[0].tobytes() == b"0"


@pytest.mark.parametrize("ext", ["", [], ["jpg", ""], "jpg;", [";"]])
def test_ext_without_an_extension(write_tar, ext):
    path = write_tar("a.tar", [("0.jpg", b"0")])
    with pytest.raises(ValueError, match="extension"):
        run(lambda: shards.read(path, ext, name="r"))


def test_a_sample_without_a_component(write_tar):
    path = write_tar("a.tar", [("k/0.jpg", b""), ("k/0.cls", b"1"), ("k/1.v1.jpg", b""), ("k/1.cls", b"1")])
    message = r"a\.tar: sample 'k/1' has no component 'jpg or jpeg'; it has 'cls', 'v1\.jpg'"
    with pytest.raises(ValueError, match=message):
        run(lambda: shards.read(path, ["cls", "jpg;jpeg"], name="r"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [(b"cat", "cat"), (b"", ""), (b"\xff1", r"\\xff1"), (b"9" * 20, "9" * 20), (b"0" * 9999, "0" * 60)],
)
def test_a_label_that_is_no_integer(write_tar, text, shown):
    path = write_tar("a.tar", [("k/0.cls", b"1"), ("k/1.cls", text), ("k/2.cls", b"dog")])
    for _ in range(2):  # from the shard, and from the cache
        with pytest.raises(ValueError, match=rf"a\.tar: sample 'k/1' has the text '{shown}' in .*'cls'") as e:
            run(lambda: shards.read(path, "cls", name="r"))
        assert "int64" in str(e.value)


def test_such_a_label_does_not_matter_where_it_is_not_asked_for(write_tar):
    path = write_tar("a.tar", [("0.cls", b"cat"), ("0.txt", b"cat")])
    (texts,) = run(lambda: shards.read(path, "txt", name="r"), batch_size=1)
    assert texts[0].tobytes() == b"cat"


def test_alternatives_that_are_not_all_labels_are_bytes(write_tar):
    path = write_tar("a.tar", [("0.cls", b"cat"), ("1.txt", b"12")])
    (texts,) = run(lambda: shards.read(path, "cls;txt", name="r", shuffle=False), batch_size=2)
    assert [text.tobytes() for text in texts] == [b"cat", b"12"]


def test_brace_patterns_lists_and_home(write_tar, tmp_path, monkeypatch):
    for i in range(12):
        write_tar(f"s-{i:04d}.tar", [("a.cls", b"%d" % i)])
    monkeypatch.setenv("HOME", str(tmp_path))
    urls = [str(tmp_path / "s-{0009..0011}.tar"), Path("~/s-0002.tar"), "~/s-000{4,1}.tar"]
    assert numbers(urls, count=6, shuffle=False) == [9, 10, 11, 2, 4, 1]
    assert numbers(tmp_path / "s-{0003..0000}.tar", count=4, shuffle=False) == [3, 2, 1, 0]


def test_shards_that_do_not_exist_are_named(write_tar, tmp_path):
    write_tar("s-1.tar", [("a.cls", b"1")])
    with pytest.raises(FileNotFoundError, match=r"2 of 3 .*s-0\.tar, .*s-2\.tar\. Check"):
        numbers(tmp_path / "s-{0..2}.tar", count=1)
    with pytest.raises(FileNotFoundError, match=r"98 of 99 .* and 93 more"):
        numbers(tmp_path / "s-{1..99}.tar", count=1)
    with pytest.raises(ValueError, match="no shards given"):
        numbers([], count=1)


@pytest.fixture
def three_shards(write_tar):
    return [
        write_tar(f"{shard}.tar", [(f"{i}.cls", b"%d" % (shard * 100 + i)) for i in range(20)])
        for shard in range(3)
    ]


ALL = [shard * 100 + i for shard in range(3) for i in range(20)]


def test_without_shuffling_the_order_is_that_of_the_shards(three_shards):
    assert numbers(three_shards, count=120, shuffle=False) == ALL * 2


def test_shuffling_follows_the_seed_and_permutes_shards_and_samples(three_shards):
    def epochs(seed):
        stream = numbers(three_shards, count=240, batch_size=12, seed=seed, shuffle=True, initial_fill=10)
        return [stream[i : i + 60] for i in range(0, 240, 60)]

    first = epochs(seed=1)
    assert epochs(seed=1) == first
    assert epochs(seed=2) != first
    assert all(sorted(epoch) == ALL for epoch in first)
    # A window of 10 in shards of 20: the shards are met one after the other, in changing order.
    assert len({tuple(number // 100 for number in epoch[:5]) for epoch in first}) > 1
    assert all(epoch != sorted(epoch) for epoch in first)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"stick_to_shard": True}])
def test_parts_are_disjoint_and_complete_in_each_epoch(three_shards, options):
    parts = [
        numbers(three_shards, count=90, batch_size=6, seed=rank, shard_id=rank, num_shards=2, **options)
        for rank in range(2)
    ]
    for epoch in range(3):
        together = [number for part in parts for number in part[epoch * 30 : epoch * 30 + 30]]
        assert sorted(together) == ALL
    first_part = [set(parts[0][epoch * 30 : epoch * 30 + 30]) for epoch in range(3)]
    sticks = options.get("stick_to_shard", False)
    assert (first_part[0] == first_part[1] == first_part[2]) == sticks


def test_pad_last_batch_reaches_the_reader(three_shards):
    pipeline = pipeline_def(
        lambda: shards.read(three_shards, "cls", name="train", shard_id=1, num_shards=7, pad_last_batch=True)
    )(batch_size=4, num_threads=1, device_id=None)
    meta = pipeline.reader_meta("train")
    assert (meta["epoch_size"], meta["epoch_size_padded"]) == (60, 63)
    assert (meta["number_of_shards"], meta["shard_id"], meta["pad_last_batch"]) == (7, 1, 1)


def test_more_ranks_than_samples(write_tar):
    path = write_tar("a.tar", [("0.cls", b"1"), ("1.cls", b"1")])
    with pytest.raises(ValueError, match=r"3 ranks \(num_shards\) cannot share 2 sample.*at most 2"):
        numbers(path, count=1, shard_id=0, num_shards=3)


@pytest.mark.parametrize("part", [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0)])
def test_part_that_is_none(write_tar, part):
    path = write_tar("a.tar", [("0.cls", b"1"), ("1.cls", b"1")])
    with pytest.raises(ValueError, match=f"shard_id={part[0]} and num_shards={part[1]}"):
        numbers(path, count=1, shard_id=part[0], num_shards=part[1])


def test_ranks_come_from_torch_distributed(three_shards, tmp_path):
    code = """if True:
        import sys
        import numpy as np
        import torch.distributed as dist
        from nvidia.dali import pipeline_def
        from dali_echo import shards

        store, rank, *paths = sys.argv[1:]
        dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
        definition = pipeline_def(lambda: shards.read(paths, "cls", name="r"))
        pipeline = definition(batch_size=30, num_threads=1, device_id=None, seed=int(rank))
        print(*np.array(pipeline.run()[0].as_tensor()))
        dist.barrier()
        dist.destroy_process_group()
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "store", str(rank), *three_shards],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    parts = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(int(number) for part in parts for number in part) == ALL


def test_under_conditionals(write_tar, jpeg, identify):
    path = write_tar("a.tar", pairs(jpeg, [3, 141, 59, 26]))

    @pipeline_def(
        batch_size=4, num_threads=1, device_id=None, enable_conditionals=True, prefetch_queue_depth=1
    )
    def definition():
        jpegs, labels = shards.read(path, ["jpg", "cls"], name="train", shuffle=False)
        images = fn.decoders.image(jpegs)
        if labels > 50:
            images = fn.flip(images)
            labels = labels * -1
        else:
            images = images * np.uint8(0)
        return images, labels

    images, labels = definition().run()
    assert np.array(labels.as_tensor()).tolist() == [3, -141, -59, 26]
    assert [identify(images.at(i)) for i in range(4)] == [0, 141, 59, 0]


def test_a_checkpoint_continues_the_same_stream(three_shards):
    @pipeline_def(batch_size=7, num_threads=1, device_id=None, seed=5, enable_checkpointing=True)
    def definition():
        return shards.read(three_shards, "cls", name="r", initial_fill=10)

    def labels(pipeline, batches):
        return [np.array(pipeline.run()[0].as_tensor()).tolist() for _ in range(batches)]

    pipeline = definition()
    labels(pipeline, 12)
    resumed = definition(checkpoint=pipeline.checkpoint())
    assert labels(resumed, 20) == labels(pipeline, 20)


def test_a_shard_that_changes_is_read_as_it_is_now(write_tar):
    path = write_tar("a.tar", [("0.cls", b"1"), ("long name of a component.cls", b"23")])
    assert numbers(path, count=2, shuffle=False) == [1, 23]
    path = write_tar("a.tar", [("x.jpg", b"x" * 5000), ("x.cls", b"5")])
    assert numbers(path, count=1, shuffle=False) == [5]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"initial_fill": 7}, "initial_fill=7"),
        ({"shuffle": False}, "shuffle=False"),
        ({"files": "ba"}, "sizes"),
    ],
)
def test_a_state_of_another_way_of_reading_is_refused(write_tar, jpeg, change, named):
    files = {"a": write_tar("a.tar", pairs(jpeg, range(6))), "b": write_tar("b.tar", pairs(jpeg, range(10)))}

    def iterate(files_in_order="ab", **options):
        @dali_echo.pipeline_def(batch_size=4, num_threads=1, device_id=None, seed=1)
        def definition():
            paths = [files[name] for name in files_in_order]
            return echo(shards.read(paths, "cls", name="train", **options))

        return EchoIterator(definition(enable_checkpointing=True), ["label"], reader_name="train")

    state = iterate().state_dict()
    iterate().load_state_dict(state)
    options = dict(change)
    other = iterate(options.pop("files", "ab"), **options)
    with pytest.raises(ValueError, match=f"shards of 'train'.*{named}"):
        other.load_state_dict(state)
