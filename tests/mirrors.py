"""A server of ours, in place of those that scripts download from."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest


class Mirror:
    """A server of ``files`` (path -> content) that knows ranges, remembers its requests, and may break off."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str, str]] = []  # method, path, range, user agent
        self.breaks_after = 0  # bytes of its next answer of a file's content

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            do_GET = do_HEAD = lambda handler: self.answer(handler)
            log_message = lambda *_: None  # noqa: E731

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range", "")
        self.requests.append((handler.command, handler.path, wanted, handler.headers["User-Agent"]))
        content = self.listing(handler.path) if handler.path.startswith("/list?") else self.files.get(handler.path)
        if content is None:
            handler.send_response(404)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-") or 0)
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        if wanted:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        if handler.command == "GET":
            end = len(content)
            if self.breaks_after and handler.path.endswith(".bz2"):
                end, self.breaks_after, handler.close_connection = start + self.breaks_after, 0, True
            handler.wfile.write(content[start:end])

    def listing(self, path: str) -> bytes:
        """As Google's storage lists: here five files a page, some of them not books."""
        start = int(parse_qs(urlsplit(path).query).get("pageToken", ["0"])[0])
        files = sorted(self.files.items())
        items = []
        for name, content in files[start : start + 5]:
            md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
            items.append({"name": name.removeprefix("/bucket/"), "size": str(len(content)), "md5Hash": md5})
        more = {"nextPageToken": str(start + 5)} if start + 5 < len(files) else {}
        return json.dumps({"items": items, **more}).encode()

    def paths(self, method: str = "GET") -> list[str]:
        return [path for asked, path, *_ in self.requests if asked == method]


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()
