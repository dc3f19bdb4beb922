"""What users of DALI's webdataset reader have reported, and what `shards` does there.

`DALI#n` is issue or pull request n of github.com/NVIDIA/DALI.
"""

import io
import json
import os
import re
import tarfile

import numpy as np
import pytest
import webdataset
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from dali_echo import shards
from dali_echo.shards.writing import image_folder

GNU, PAX, USTAR = tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT
LONG = "/".join(["folder" * 4] * 6) + "/"


def pipeline(read, batch_size):
    built = pipeline_def(read)(batch_size=batch_size, num_threads=1, device_id=None, seed=1)
    built.build()
    return built


def values(path, ext="cls", count=2, **options):
    """The first `count` samples of a component."""
    built = pipeline(lambda: shards.read(path, ext, name="r", **{"shuffle": False, **options}), count)
    (output,) = built.run()
    return [np.asarray(output.at(i)).tolist() for i in range(count)]


def add(tar, name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def tar_of(path, members, format=GNU, **options):
    """Members are (name, data) or (name, data, fields of TarInfo)."""
    with tarfile.open(path, "w", format=format, **options) as tar:
        for name, data, *fields in members:
            add(tar, name, data, **(fields[0] if fields else {}))
    return path


PAIRS = [("0.jpg", b"J"), ("0.cls", b"6"), ("1.jpg", b"K"), ("1.cls", b"12")]


def named(prefix):
    return [(prefix + name, data) for name, data in PAIRS]


READ = {
    "DALI#5440, a dotfile first": [("._0.jpg", b"macOS"), *PAIRS],
    "DALI#5440, a README first": [("README", b"text"), *PAIRS],
    "DALI#5440, a dotfile in the middle": [*PAIRS[:2], (".DS_Store", b"x"), *PAIRS[2:]],
    "DALI#3640, PAX": (PAIRS, PAX),
    "DALI#3640, a PAX header per member": ([(n, d, {"mtime": 1.5}) for n, d in PAIRS], PAX),
    "DALI#3640, PAX long names": (named(LONG), PAX),
    "DALI#3640, a PAX global header": (PAIRS, PAX, {"comment": "all of them"}),
    "DALI#4215, GNU long names": (named(LONG), GNU),
    "DALI#4215, USTAR prefix": (named(LONG), USTAR),
    "DALI#6422, an owner with spaces": [(n, d, {"uname": "some one", "gname": "a b"}) for n, d in PAIRS],
    "DALI#6409, letters beyond ASCII": named("ключ/日本é "),
    "DALI#6409, spaces in names": named("with space/a b"),
    "components that are no neighbours": sorted(PAIRS, key=lambda pair: pair[0][2:]),
    "a folder": [("f.d/", b"", {"type": tarfile.DIRTYPE}), *PAIRS],
    "a symlink": [*PAIRS[:2], ("x.cls", b"", {"type": tarfile.SYMTYPE, "linkname": "0.cls"}), *PAIRS[2:]],
    "upper-case extensions": [(name.upper(), data) for name, data in PAIRS],
}


@pytest.mark.parametrize("case", READ)
def test_is_read(tmp_path, case):
    """DALI: "Underful sample", a malformed index, bytes of a header as label, samples that are empty."""
    given = READ[case] if isinstance(READ[case], tuple) else (READ[case],)
    options = {"pax_headers": given[2]} if given[2:] else {}
    path = tar_of(tmp_path / "a.tar", *given[:2], **options)
    assert values(path) == [6, 12]
    assert values(path, "jpg") == [[ord("J")], [ord("K")]]


def test_dali_3640_what_webdataset_writes(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for label in (6, 12):
            writer.write({"__key__": f"k/{label}", "cls": label})
    assert values(tmp_path / "a.tar") == [6, 12]


REFUSED = {
    "DALI#5440, no cls": (PAIRS[:3], "sample '1' has no component 'cls'; it has 'jpg'"),
    "DALI#5228, a dot in the name": (
        [("0.image.jpg", b"J"), ("0.cls", b"6")],
        "sample '0' has no component 'jpg'; it has 'cls', 'image.jpg'.*starts at the first dot",
    ),
    "DALI#4093, no sample matches": ([("0.jpeg", b"J"), ("0.cls", b"1")], "no component 'jpg'"),
    "DALI#4879, a component twice": ([*PAIRS, PAIRS[0]], "sample '0' has no component 'cls'"),
    "an empty shard": ([], "the shard holds no sample"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_before_it_runs(tmp_path, case):
    """DALI: an epoch of empty tensors, an assertion, or an error without the file's name."""
    members, message = REFUSED[case]
    path = tar_of(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(path))}.*{message}"):
        pipeline(lambda: shards.read(path, ["jpg", "cls"], name="r"), 2)


def damaged(whole):
    return {
        "cat a.tar b.tar": whole + whole,
        "truncated": whole[: 3 * 512 - 100],
        "gzip": b"\x1f\x8b\x08\0" + whole,
        "html": b"<html>not found</html>" * 60,
        "wrong checksum": whole[:1030] + b"x" + whole[1031:],
        "0 bytes": b"",
    }


@pytest.mark.parametrize("case", damaged(b""))
def test_damage_is_refused_with_the_path(tmp_path, case):
    """DALI: samples lost without a word, or "Corrupted tar file at" with no path."""
    path = tar_of(tmp_path / "a.tar", PAIRS)
    path.write_bytes(damaged(path.read_bytes())[case])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: not a complete, uncompressed tar"):
        pipeline(lambda: shards.read(path, "cls", name="r"), 2)
    assert [finding.shard for finding in shards.verify(path) if finding.key is None] == [path]


def test_dali_4093_more_parts_than_samples(tmp_path):
    path = tar_of(tmp_path / "a.tar", PAIRS)
    with pytest.raises(ValueError, match=r"3 ranks \(num_shards\) cannot share 2 sample"):
        pipeline(lambda: shards.read(path, "cls", name="r", shard_id=0, num_shards=3), 2)


def test_dali_5441_and_4608_an_iterator_ends(tmp_path):
    path = tar_of(tmp_path / "a.tar", [(f"{i}.cls", b"%d" % i) for i in range(7)])
    built = pipeline(lambda: shards.read(path, "cls", name="r", pad_last_batch=True), 4)
    batches = DALIGenericIterator(
        built, ["cls"], reader_name="r", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    for _ in range(2):
        assert sorted(int(label) for (batch,) in batches for label in batch["cls"]) == list(range(7))


def test_dali_5429_shards_are_written_in_random_order(tmp_path):
    """A reader's window of `initial_fill` cannot mix classes that lie far apart."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.jpg").touch()
    first = [label for _, label in image_folder(tmp_path)[:20]]
    assert 3 < sum(first) < 17


def test_dali_6288_shards_come_in_another_order_in_each_epoch(tmp_path):
    for shard in range(6):
        tar_of(tmp_path / f"{shard}.tar", [(f"{i}.cls", b"%d" % shard) for i in range(4)])
    built = pipeline(lambda: shards.read(tmp_path / "*.tar", "cls", name="r", initial_fill=1), 24)
    epochs = [np.array(built.run()[0].as_array()).tolist() for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_dali_6203_a_second_start_reads_no_shard(tmp_path):
    path = tar_of(tmp_path / "a.tar", PAIRS)
    values(path)
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert pipeline(lambda: shards.read(path, "cls", name="r"), 2).epoch_size("r") == 2


def test_dali_4839_3641_and_3658_labels_of_other_lengths_make_a_dense_batch(tmp_path):
    path = tar_of(tmp_path / "a.tar", PAIRS)
    (labels,) = pipeline(lambda: shards.read(path, "cls", name="r", shuffle=False), 2).run()
    assert labels.as_array().tolist() == [6, 12]
    assert labels.dtype == types.INT64


def test_dali_3690_and_5852_arrays(tmp_path):
    def npy(value):
        file = io.BytesIO()
        np.save(file, np.full((2, 3), value, np.float32))
        return file.getvalue()

    path = tar_of(tmp_path / "a.tar", [("0.npy", npy(0.5)), ("1.npy", npy(1.5))])

    def read():
        return fn.decoders.numpy(shards.read(path, "npy", name="r", shuffle=False), dtype=types.FLOAT)

    (arrays,) = pipeline(read, 2).run()
    assert arrays.as_array().shape == (2, 2, 3)
    assert arrays.as_array()[:, 0, 0].tolist() == [0.5, 1.5]


def test_dali_4209_captions_in_json(tmp_path):
    captions = ["a cat", "ключ"]
    path = tar_of(
        tmp_path / "a.tar",
        [(f"{i}.json", json.dumps({"n": [i, len(c)]}).encode()) for i, c in enumerate(captions)],
    )

    def read():
        text = shards.read(path, "json", name="r", shuffle=False)
        return fn.python_function(text, function=lambda t: np.array(json.loads(t.tobytes())["n"]))

    (numbers,) = pipeline(read, 2).run()
    assert numbers.as_array().tolist() == [[0, 5], [1, 4]]
