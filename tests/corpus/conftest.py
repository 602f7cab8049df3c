"""A server of files at URLs, for tests that make a corpus there."""

from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture(scope="module")
def s3_bucket() -> Iterator[str]:
    """A bucket of a server that speaks as S3 does."""
    server_of = pytest.importorskip("moto.server", reason="no moto: pip install 'moto[server]'")
    pytest.importorskip("s3fs", reason="no s3fs: pip install s3fs")
    server = server_of.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patched.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.setenv(name, "any")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()
