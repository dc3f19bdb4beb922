import shutil
import socket
import subprocess
import urllib.request

import numpy as np
import pytest

from dali_echo import echo, pipeline_def, shards
from dali_echo.pytorch import EchoIterator
from dali_echo.testing import assert_resumes_exactly

MOTO = shutil.which("moto_server")
pytestmark = pytest.mark.skipif(
    MOTO is None, reason="no moto_server on PATH: install 'moto[server,s3]' in an environment of its own"
)


@pytest.fixture(scope="module")
def put():
    """Store an object on an S3 server. The server is another process: DALI keeps the GIL while it builds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [MOTO, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def put(name, data=b""):
        headers = {"x-amz-acl": "public-read", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{url}/{name}", data, headers, method="PUT")
        urllib.request.urlopen(request).close()

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            environment.setenv(name, value)
        while True:
            try:
                put("bucket")
                break
            except OSError:
                assert process.poll() is None
        yield put
    process.kill()
    process.wait()


@pipeline_def(batch_size=4, num_threads=1, device_id=None, seed=1, enable_checkpointing=True)
def labels(urls, ext="cls", shuffle=False, factor=1):
    return echo(shards.read(urls, ext, name="r", shuffle=shuffle), factor=factor)


@pytest.fixture
def bucket(put, write_tar):
    for shard in range(2):
        path = write_tar(f"{shard}.tar", [(f"{i}.cls", b"%d" % (shard * 10 + i)) for i in range(10)])
        put(f"bucket/{shard}.tar", path.read_bytes())
        put(f"bucket/{shard}.tar.idx", shards.index(path)[0].read_bytes())
    return "s3://bucket/{0..1}.tar"


def test_samples_epochs_and_states(bucket):
    pipeline = labels(bucket)
    found = [int(label) for _ in range(5) for label in np.array(pipeline.run()[0].as_tensor())]
    assert found == list(range(20))
    assert pipeline.epoch_size("r") == 20
    assert_resumes_exactly(
        lambda: EchoIterator(labels(bucket, shuffle=True, factor=2), ["label"], reader_name="r"), steps=4
    )


def test_a_missing_component(bucket):
    with pytest.raises(ValueError, match=r"s3://bucket/0\.tar: sample '0' has no component 'jpg'"):
        labels(bucket, ext="jpg")


def test_a_shard_without_an_index_is_refused_with_the_remedy(put, bucket):
    with pytest.raises(OSError, match=r"s3://bucket/x\.tar: .*not found.*dali-echo shards index"):
        labels("s3://bucket/x.tar")
    put("bucket/0.tar.idx", b"v1.2 1\ncls 512 1 0.cls\n")
    with pytest.raises(ValueError, match=r"0\.tar\.idx: no whole index"):
        labels(bucket)


def test_buckets_and_other_shards_in_one_call(bucket, tmp_path):
    with pytest.raises(ValueError, match="with shards elsewhere"):
        labels([bucket, "http://127.0.0.1/0.tar"])
