import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from dali_echo import shards
from dali_echo.shards.writing import image_folder, image_samples


def samples(count, size=1):
    return ({"__key__": f"k/{i:04d}", "bin": b"%d" % (i % 10) * size, "cls": i} for i in range(count))


def read(paths, count):
    pipeline = pipeline_def(lambda: shards.read(paths, ["bin", "cls"], name="r", shuffle=False))(
        batch_size=count, num_threads=1, device_id=None
    )
    parts, labels = pipeline.run()
    return [parts.at(i).tobytes() for i in range(count)], [int(labels.at(i)) for i in range(count)]


def test_what_is_written_is_read(tmp_path):
    paths = shards.write(samples(25), tmp_path / "new" / "a-%03d.tar", max_samples=10)
    assert paths == [tmp_path / "new" / f"a-00{i}.tar" for i in range(3)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [path.name for path in paths]
    assert read(paths, 25) == ([b"%d" % (i % 10) for i in range(25)], list(range(25)))
    assert list(shards.info(paths).samples.values()) == [10, 10, 5]
    assert shards.verify(paths) == []


def test_shards_are_limited_in_bytes(tmp_path):
    paths = shards.write(samples(20, size=20_000), tmp_path / "a-%d.tar", max_bytes="100kB")
    assert all(path.stat().st_size <= 100_000 for path in paths)
    assert list(shards.info(paths).samples.values()) == [4] * 5


def test_the_same_samples_make_the_same_bytes(tmp_path):
    a, b = (shards.write(samples(5), tmp_path / f"{name}-%d.tar")[0] for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_arrays_and_other_values_are_encoded(tmp_path):
    image = np.full((4, 6, 3), 7, np.uint8)
    (path,) = shards.write(
        [{"__key__": "a", "__url__": "x", "png": image, "json": {"a": 1}}], tmp_path / "%d.tar"
    )
    assert shards.info(path).components == {"json": 1, "png": 1}


def test_nothing_is_left_of_a_failure(tmp_path):
    def failing():
        yield from samples(15)
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        shards.write(failing(), tmp_path / "a-%d.tar", max_samples=10)
    assert list(tmp_path.iterdir()) == []


def test_shards_that_are_there_are_left_alone(tmp_path):
    (tmp_path / "a-7.tar").write_bytes(b"mine")
    (tmp_path / "b-0.tar").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"1 shard\(s\) of .*'a-%d.tar' already, such as a-7.tar"):
        shards.write(samples(1), tmp_path / "a-%d.tar")
    assert (tmp_path / "a-7.tar").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"bin": b""}, "__key__ None"),
        ({"__key__": "a.b", "bin": b""}, "__key__ 'a.b'"),
        ({"__key__": "a/", "bin": b""}, "__key__ 'a/'"),
        ({"__key__": "a"}, r"components \[\]"),
        ({"__key__": "a", "JPG": b""}, "in lower case"),
        ({"__key__": "a", "": b""}, "in lower case"),
        ({"__key__": "a", "b/c": b""}, "in lower case"),
        ({"__key__": "a", "what": object()}, "sample 'a': no handler found for what"),
    ],
)
def test_samples_that_would_not_be_read_back(tmp_path, sample, message):
    with pytest.raises(ValueError, match=message):
        shards.write([sample], tmp_path / "a-%d.tar")


def test_a_key_twice_and_no_sample(tmp_path):
    with pytest.raises(ValueError, match="'k/0000' is there twice"):
        shards.write([*samples(2), *samples(1)], tmp_path / "a-%d.tar")
    with pytest.raises(ValueError, match="no sample"):
        shards.write([], tmp_path / "a-%d.tar")


@pytest.mark.parametrize("pattern", ["a.tar", "a-%s.tar", "a-%d.tgz", "a-%d-%d.tar", "a-%d%.tar"])
def test_patterns_that_are_none(tmp_path, pattern):
    with pytest.raises(ValueError, match="expected one number and"):
        shards.write(samples(1), tmp_path / pattern)


def test_limits_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="max_samples = 0"):
        shards.write(samples(1), tmp_path / "a-%d.tar", max_samples=0)
    with pytest.raises(ValueError, match="'much' is no size"):
        shards.write(samples(1), tmp_path / "a-%d.tar", max_bytes="much")


@pytest.fixture
def folder(tmp_path, jpeg):
    for name, numbers in {"cat": range(3), "ant": range(10, 14)}.items():
        for number in numbers:
            path = tmp_path / "images" / name / f"img.{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(number))
    (tmp_path / "images" / "cat" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_a_folder_of_classes(folder, tmp_path, identify):
    images = image_folder(folder, seed=1)
    assert images != sorted(images)
    assert images == image_folder(folder, seed=1) != image_folder(folder, seed=2)
    paths = shards.write(image_samples(folder, images), tmp_path / "a-%d.tar")
    assert shards.info(paths).classes == {"cls": {0: 4, 1: 3}}

    @pipeline_def(batch_size=7, num_threads=1, device_id=None)
    def definition():
        jpegs, labels = shards.read(paths, ["jpg", "cls"], name="r")
        return fn.decoders.image(jpegs), labels

    pixels, labels = definition().run()
    found = {(identify(pixels.at(i)), int(labels.at(i))) for i in range(7)}
    assert found == {(n, 1) for n in range(3)} | {(n, 0) for n in range(10, 14)}


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="has no sub-folders"):
        image_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="cat holds no image"):
        image_folder(tmp_path)
