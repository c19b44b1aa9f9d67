"""A real HTTP server on loopback, for the sources that download."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder; yields the server's address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_arguments) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
