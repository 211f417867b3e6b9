"""Server of a folder as a web site on a free local port, compressed as by real servers."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from functools import lru_cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMPRESSED = (".html", ".css", ".js", ".json", ".svg", ".xml", ".txt", ".ipynb", ".md", ".py")
compress = lru_cache(64)(partial(gzip.compress, compresslevel=6, mtime=0))  # pages share files


class Handler(SimpleHTTPRequestHandler):
    """Request handler that compresses text and prints nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send a file, or say that there is none."""
        self.send_file(body=True)

    def do_HEAD(self) -> None:
        """Send only a file's headers."""
        self.send_file(body=False)

    def send_file(self, body: bool) -> None:
        """Send the file `self.path`; for a folder, its index.html."""
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            path /= "index.html"
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        accepts = "gzip" in self.headers.get("Accept-Encoding", "")
        if path.suffix in COMPRESSED and accepts:
            content = compress(content)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Vary", "Accept-Encoding")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the tests observe the browser."""


@contextlib.contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve `folder` while the context lasts; yield its address, "http://127.0.0.1:<port>/"."""
    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()
