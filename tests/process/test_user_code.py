"""The user's own side: workers that live in a script or a notebook, folders with our names, and a clean stdout."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.executor_harness import DEADLINE_S, REPOSITORY, SoftMachine, run_script

WORKER = '''
from checkpoint_executor import CUDACheckpointExecutor
from checkpoint_executor.workers import Worker, execution

SCALE = 10

def scaled(number):
    return SCALE * number

class Base(Worker):
    def __init__(self, context, number=1):
        super().__init__(context)
        self.memory = context.allocator.allocate(4096)
        self.memory.write(b"weights!")
        self.number = number

class MyWorker(Base):
    """Refers to names of its own module, to a base class there, and to super()."""

    def __init__(self, context, number=1):
        super().__init__(context, number)

    @execution
    def compute(self):
        return scaled(self.number) + self.context.rank

    def read(self):
        return self.memory.read(0, 8)
'''

USE = """
with CUDACheckpointExecutor(MyWorker, 2, worker_args=(4,), **OPTIONS) as executor:
    assert executor.collective_rpc("compute") == [40, 41]
    executor.sleep()
    executor.wake_up(["weights"])
    try:
        executor.collective_rpc("compute")
    except Exception as error:
        assert "asleep" in str(error), error
    else:
        raise AssertionError("an execution method ran while a tag was asleep")
    executor.wake_up()
    assert executor.collective_rpc("read") == [b"weights!"] * 2
    assert executor.collective_rpc(lambda worker: scaled(worker.number)) == [40, 40]
print("done")
"""


def write(folder: Path, *parts: str) -> Path:
    script = folder / "script.py"
    script.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return script


def options(machine: SoftMachine) -> str:
    return f"OPTIONS = {machine.options()!r}"


def test_a_worker_defined_in_the_users_script_works(machine: SoftMachine, tmp_path: Path) -> None:
    script = write(tmp_path, options(machine), WORKER, USE)
    assert run_script(script) == (0, "done\n", "")


def test_a_script_without_a_main_guard_is_not_run_again_in_the_workers(machine: SoftMachine, tmp_path: Path) -> None:
    script = write(tmp_path, "print('begun', flush=True)", options(machine), WORKER, USE)
    assert run_script(script) == (0, "begun\ndone\n", "")


def test_a_module_that_builds_an_executor_at_import_is_refused_in_the_workers(
    machine: SoftMachine, tmp_path: Path
) -> None:
    """Each worker would start workers of its own, and these again, until nothing is left of the machine."""
    (tmp_path / "unguarded.py").write_text(
        # (Ends by itself after a few generations, should it not be refused.)
        "import os\n"
        "os.environ['DEPTH'] = str(int(os.environ.get('DEPTH', 0)) + 1)\n"
        "assert int(os.environ['DEPTH']) < 4, 'it was not refused'\n"
        "from checkpoint_executor import CUDACheckpointExecutor\n"
        f"CUDACheckpointExecutor('unguarded:Policy', device='soft', soft_root={str(machine.root)!r})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", "import unguarded"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 1
    assert "an executor is being built in a worker or the helper of another one" in result.stderr


@pytest.mark.parametrize("namespace", ["vars(__import__('__main__'))", "{'__name__': '__main__'}"])
def test_a_worker_defined_in_a_notebook_works(machine: SoftMachine, tmp_path: Path, namespace: str) -> None:
    # A notebook's cells are executed in one namespace that calls itself __main__ and has no file.
    cells = [options(machine), WORKER, USE]
    script = write(tmp_path, f"namespace = {namespace}", f"for cell in {cells!r}: exec(cell, namespace)")
    assert run_script(script) == (0, "done\n", "")


def test_a_worker_in_a_module_beside_the_script_works(machine: SoftMachine, tmp_path: Path) -> None:
    (tmp_path / "my_workers.py").write_text(WORKER)
    script = write(tmp_path, options(machine), "from my_workers import *", USE)
    assert run_script(script) == (0, "done\n", "")


def test_the_users_own_folders_of_our_names_do_not_shadow_ours(machine: SoftMachine, tmp_path: Path) -> None:
    for name in ("workers", "helper"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"WHOSE = 'the user'\nprint('{name} of the user')\n")
        (tmp_path / name / "__main__.py").write_text("raise SystemExit('the wrong program')\n")
        (tmp_path / name / "service.py").write_text("raise SystemExit('the wrong module')\n")
    mine = """
    import workers, helper
    def whose(worker):
        import workers, helper
        return workers.WHOSE, helper.WHOSE
    """
    use = """
    with CUDACheckpointExecutor(MyWorker, **OPTIONS) as executor:
        assert executor.collective_rpc(whose) == [("the user", "the user")]
        executor.sleep()
        executor.wake_up()
    """
    script = write(tmp_path, options(machine), WORKER, mine, use)
    status, out, err = run_script(script)
    # Theirs are theirs, in the workers too, where they print to stderr.
    assert (status, out) == (0, "workers of the user\nhelper of the user\n"), err
    assert set(err.splitlines()) == {"workers of the user", "helper of the user"}


def test_the_folder_a_program_is_run_in_does_not_shadow_what_the_children_import(
    machine: SoftMachine, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("msgspec", "zmq", "psutil", "select", "checkpoint_executor"):
        (here / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")
    script = write(tmp_path, options(machine), WORKER, USE)
    assert run_script(script, cwd=here) == (0, "done\n", "")


def test_the_workers_stdout_does_not_land_on_the_parents(machine: SoftMachine, tmp_path: Path) -> None:
    use = """
    def speak(worker):
        import os, sys
        print("printed by a worker", flush=True)
        os.write(1, b"written by a worker\\n")
        sys.stderr.write("complaint of a worker\\n")

    with CUDACheckpointExecutor(MyWorker, **OPTIONS) as executor:
        executor.collective_rpc(speak)
    print("data")
    """
    script = write(tmp_path, options(machine), WORKER, use)
    status, out, err = run_script(script)
    assert (status, out) == (0, "data\n")
    assert set(err.splitlines()) == {"printed by a worker", "written by a worker", "complaint of a worker"}


def test_a_parent_without_a_stderr_gives_its_workers_none(machine: SoftMachine, tmp_path: Path) -> None:
    """As daemons are started. What has descriptor 2 in such a parent is a socket of ours, and no place to print to."""
    use = """
    def outputs(worker):
        import os
        return [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]

    with CUDACheckpointExecutor(MyWorker, **OPTIONS) as executor:
        print(executor.collective_rpc(outputs))
    """
    script = write(tmp_path, options(machine), WORKER, use)
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$1" 2>&-', sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[['/dev/null', '/dev/null']]\n")


def test_a_worker_has_no_stdin(machine: SoftMachine) -> None:
    def read(worker: object) -> str:
        import sys

        return sys.stdin.read()

    assert machine.make().collective_rpc(read) == [""]


def test_a_worker_inherits_no_descriptor_of_the_parent(machine: SoftMachine, tmp_path: Path) -> None:
    import os

    path = tmp_path / "open in the parent"

    def links(worker: object) -> list[str]:
        import os

        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                pass
        return found

    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        (found,) = machine.make().collective_rpc(links)
    assert str(path) not in found
