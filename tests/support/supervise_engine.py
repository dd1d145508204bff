"""An engine over HTTP for the tests of the supervisor: a command like ``vllm serve``, small.

It tells what it was asked in a log that outlives it, holds memory on a software device, leaves orphans, and fails as
it is told: ``POST /do?what=...``. Standard library only, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["log_of", "orphan"]

#: How an orphan looks: in a session of its own, and its parent gone.
ORPHAN = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"


def orphan(*, marked: bool = True) -> None:
    """Leave a process behind that nobody waits for."""
    environ = dict(os.environ) if marked else {}
    subprocess.run([sys.executable, "-S", "-c", ORPHAN], env=environ, check=True)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What the engines were asked, in order."""
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Engine:
    """The state: healthy or not, sleeping or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.healthy = True
        self.sleeping = False

    def log(self, **what: object) -> None:
        with (self.folder / "log").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")

    def handle(self, path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        match path:
            case "/health":
                return (200 if self.healthy else 503), b""
            case "/is_sleeping":
                return 200, json.dumps({"is_sleeping": self.sleeping}).encode()
            case "/sleep":
                self.sleeping = True
                return 200, b""
            case "/wake_up":
                if query.get("tags") == ["nonsense"]:
                    return 400, b"unknown tag"
                self.sleeping = False
                return 200, b""
            case "/do":
                return self.do(query["what"][0])
        return 404, b""

    def do(self, what: str) -> tuple[int, bytes]:
        match what:
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(7)
            case "end":
                os._exit(0)
            case "sick":
                self.healthy = False
            case "refuse":
                return 500, b"refused, and unharmed"
            case "break":
                self.healthy = False
                return 500, b"engine dead"
            case "orphan":
                orphan()
        return 200, b""


def main() -> None:
    port, folder, soft_root = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    engine = Engine(folder)
    if soft_root:
        from checkpoint_executor.softgpu import SoftProcess

        process = SoftProcess.open(soft_root, "SOFT-0")
        process.allocate(1 << 20)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            if url.path not in ("/health", "/trickle"):
                engine.log(method=self.command, path=url.path, query=query)
            if url.path == "/trickle":
                self.trickle()
                return
            status, body = engine.handle(url.path, query)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815 - the names are http.server's

        def trickle(self) -> None:
            """A byte now and then, for ever: no timeout of a socket fires."""
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" ")
                time.sleep(0.05)

        def log_message(self, *args: object) -> None:
            pass

    # Address reuse is on in http.server, so that the next engine can have the port at once.
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    engine.log(started=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
