"""A target on the software device; the commands are those of ``targets.TargetProcess``, and a few of softgpu's own."""

from __future__ import annotations

import hashlib
import os
import threading

from checkpoint_executor.softgpu import ImportedSegment, SoftProcess
from tests.support import child


class SoftTarget(child.CallsFromThread):
    def __init__(self, process: SoftProcess, size_bytes: int, seed: int) -> None:
        self._process = process
        # More than one allocation, of uneven sizes that are no multiple of a page.
        sizes = [size for size in (size_bytes // 3 + 1, size_bytes - size_bytes // 3 - 1) if size > 0]
        self._segments = [process.allocate(size) for size in sizes]
        expected = hashlib.sha256()
        for index, segment in enumerate(self._segments):
            pattern = hashlib.shake_128(f"{seed}/{index}".encode()).digest(segment.size_bytes)
            expected.update(pattern)
            segment.write(pattern)
        self.pattern_checksum = expected.hexdigest()
        self._stop = threading.Event()
        self._busy: list[threading.Thread] = []
        self._calls = 0
        self._imported: ImportedSegment | None = None

    def checksum(self) -> str:
        digest = hashlib.sha256()
        with self._process.call():
            for segment in self._segments:
                digest.update(segment.read())
        return digest.hexdigest()

    def address(self) -> list[int]:
        return [segment.address for segment in self._segments]

    def start_busy(self, kind: str = "long", threads: int = 1) -> None:
        self._stop.clear()
        inside = threading.Barrier(threads + 1)
        work = {"long": self._long_call, "short": self._short_calls}[kind]
        self._busy = [threading.Thread(target=work, args=(inside,), daemon=True) for _ in range(threads)]
        for thread in self._busy:
            thread.start()
        inside.wait()

    def _long_call(self, inside: threading.Barrier) -> None:
        with self._process.call():
            inside.wait()
            self._stop.wait()

    def _short_calls(self, inside: threading.Barrier) -> None:
        inside.wait()
        while not self._stop.is_set():
            with self._process.call():
                self._calls += 1

    def stop_busy(self) -> int:
        self._stop.set()
        for thread in self._busy:
            thread.join()
        return self._calls

    def stray_read(self) -> int:
        return self._segments[0].buffer[0]

    # The software device's own.

    def export(self) -> str:
        return self._segments[0].export()

    def import_segment(self, handle: str) -> int:
        self._imported = self._process.import_segment(handle)
        return self._imported.buffer[0]

    def release_import(self) -> None:
        if self._imported is not None:
            self._imported.release()

    def free_first(self) -> None:
        self._process.free(self._segments.pop(0))

    def unmap_first(self) -> None:
        self._segments[0].unmap()

    def churn(self, size_bytes: int, rounds: int) -> None:
        """Allocate and free, to compete for the ledger."""
        for _ in range(rounds):
            self._process.free(self._process.allocate(size_bytes))

    def resident_bytes(self) -> int:
        return self._process.resident_bytes

    def fork_and_use(self) -> list[str]:
        """What a forked child is told when it uses its parent's device, which it also closes."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers = []
            try:
                self._process.allocate(1)
            except RuntimeError as error:
                answers.append(str(error))
            self._process.close()
            os.write(writing, "\n".join(answers).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return text.splitlines()

    def fork_and_linger(self) -> int:
        """The pid of a forked child that lives on until it is killed."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"1")  # the fork's hooks have run
            threading.Event().wait()
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        return pid


def main() -> None:
    given = child.arguments()
    parent = child.channel()
    try:
        process = SoftProcess.open(given["root"], given["device"], capacity_bytes=given["capacity_bytes"])
        target = SoftTarget(process, given["size_bytes"], given["seed"])
    except MemoryError as error:
        parent.send({"no_memory": str(error)})
        return
    commands = {name: getattr(target, name) for name in dir(target) if not name.startswith("_")}
    child.serve(parent, commands, checksum=target.pattern_checksum)
    process.close()


if __name__ == "__main__":
    main()
