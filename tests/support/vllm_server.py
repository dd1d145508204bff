"""vLLM's own API server in a process of its own, with our executor below it, and a client for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from checkpoint_executor import process_tree, procfs
from tests.support.vllm_harness import EXECUTOR, PROMPT, OnMachine, VllmMachine
from tests.support.vllm_waiting import DEADLINE_S, wait_until

__all__ = ["Client", "Server", "free_port", "serve_command", "server_environment"]


class Client:
    """Of the API server at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> tuple[int, Any]:
        return self._request(urllib.request.Request(self._url(path)))

    def post(self, path: str, body: object = None) -> tuple[int, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._request(urllib.request.Request(self._url(path), data=data, headers=headers, method="POST"))

    def tokens(self, count: int = 24) -> str:
        """Greedy completion after the usual prompt, as text of token names."""
        body = {"model": "soft", "prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        code, answer = self.post("/v1/completions", body)
        assert code == 200, answer
        return str(answer["choices"][0]["text"])

    def requests_in_flight(self) -> int:
        """Requests that the server has taken and not answered."""
        return int(self.get("/load")[1]["server_load"])

    def connect_and_leave(self) -> None:
        """A client that sends a request, and goes before it has an answer."""
        before = self.requests_in_flight()
        body = json.dumps({"model": "soft", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: self.requests_in_flight() == before + 1, "the request was taken")
        wait_until(lambda: self.requests_in_flight() == before, "the request was dropped")

    def is_unhealthy(self) -> bool:
        try:
            return self.get("/health")[0] >= 500
        except OSError:
            return True

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @staticmethod
    def _request(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
                return reply.status, _decoded(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read())


class Server(Client, OnMachine):
    """``vllm serve`` in development mode."""

    def __init__(self, machine: VllmMachine, ranks: int = 1) -> None:
        super().__init__(free_port())
        self.machine = machine
        self.ranks = ranks
        self.log_path = machine.folder / "server.log"
        command = serve_command(machine, self.port, ranks)
        # (The command line would spawn the rest as well; how workers start is another test's subject.)
        environ = {**server_environment(machine, ranks), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        # Forked, because this process has imported what a new one would import for 20 s.
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(command, environ, self.log_path), name="api-server"
        )
        self.process.start()

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.is_alive(), self.log_path.read_text()[-4000:]
            try:
                return self.get("/health")[0] == 200
            except OSError:
                return False

        wait_until(ready, "the server answers", 3 * DEADLINE_S)

    def close(self) -> None:
        assert self.process.pid is not None
        pids = [self.process.pid]
        for found in self.machine.statuses():
            pids += [found.pid, *found.processes.values()]
        self.process.terminate()
        try:
            self.process.join(DEADLINE_S)
            assert not self.process.is_alive(), "the server did not end"
        finally:
            self.process.kill()
            self.process.join()
        for pid in pids:
            wait_until(lambda pid=pid: not procfs.is_alive(pid), f"{pid} is gone", 10)  # type: ignore[misc]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(machine: VllmMachine, ranks: int = 1) -> dict[str, str]:
    """What the server is to have in its environment."""
    environ = machine.environment(ranks, VLLM_SERVER_DEV_MODE="1")
    # As below a supervisor, which is how it should run.
    return {**environ, process_tree.MARKER: "test"}


def serve_command(machine: VllmMachine, port: int, ranks: int = 1) -> list[str]:
    """The command line of the server, whose model gets a tokenizer."""
    _write_tokenizer(machine.model)
    command = ["vllm", "serve", str(machine.model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "soft", "--load-format", "dummy", "--max-model-len", "512"]
    command += ["--enable-sleep-mode", "--distributed-executor-backend", EXECUTOR, "--enable-server-load-tracking"]
    if ranks > 1:
        command += ["--tensor-parallel-size", str(ranks), "--enable-nccl-comm-suspend", "--disable-custom-all-reduce"]
    return command


def _serve(command: list[str], environ: dict[str, str], log_path: Path) -> None:
    """In the forked process: what the command line does."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    os.environ.update(environ)
    sys.argv = command
    from vllm.entrypoints.cli.main import main

    main()


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def _write_tokenizer(folder: Path) -> None:
    """One word for each token: the server wants a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found, unused-ignore]

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32000)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
