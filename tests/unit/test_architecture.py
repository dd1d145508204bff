"""The rules of who may import whom (design, section 3), read from the source itself, and what importing us imports.

A rule that is only written down holds until the first hurried change; these read the AST of every module.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "checkpoint_executor"


class Import(Struct, frozen=True):
    """One imported name, as an absolute dotted path."""

    module: str
    name: str
    line: int
    #: Only for type checkers (``if TYPE_CHECKING``).
    typing_only: bool
    #: Not in a function: happens when the module is imported.
    at_import: bool


class Module(Struct, frozen=True):
    path: Path
    name: str
    docstring: str
    imports: tuple[Import, ...]

    @property
    def is_pure(self) -> bool:
        return self.docstring.startswith("PURE.")


def _is_type_checking(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
    return False


def _imports(node: ast.AST, package: str, *, typing_only: bool = False, at_import: bool = True) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, "", child.lineno, typing_only, at_import)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{package}, line {child.lineno}: relative imports are not used"
                for alias in names:
                    yield Import(module or "", alias.name, child.lineno, typing_only, at_import)
            case _:
                inner = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from _imports(
                    child, package, typing_only=typing_only or _is_type_checking(child), at_import=inner
                )


def _read(path: Path, name: str) -> Module:
    tree = ast.parse(path.read_text(), str(path))
    return Module(path, name, ast.get_docstring(tree) or "", tuple(_imports(tree, name)))


def _modules(folder: Path, package: str) -> list[Module]:
    """Modules of a folder; its sub-packages and the two links are packages of their own."""
    return [_read(path, f"{package}.{path.stem}") for path in sorted(folder.glob("*.py"))]


LIBRARY = _modules(PACKAGE, "checkpoint_executor")
VLLM = _modules(PACKAGE / "vllm", "checkpoint_executor.vllm")
HELPER = _modules(REPOSITORY / "helper", "checkpoint_executor.helper")
WORKERS = _modules(REPOSITORY / "workers", "checkpoint_executor.workers")
EVERY_MODULE = [*LIBRARY, *VLLM, *HELPER, *WORKERS]
PURE = {module.name for module in EVERY_MODULE if module.is_pure}

#: What a pure module may import of others' code: data and text, no I/O.
PURE_LIBRARIES = {
    "__future__", "ast", "base64", "collections", "contextlib", "dataclasses", "difflib", "enum", "fnmatch",
    "functools", "hashlib", "html", "itertools", "json", "math", "operator", "pickle", "re", "shlex", "statistics",
    "string", "struct", "textwrap", "types", "typing", "msgspec",
}  # fmt: skip
PURE_EXCEPTIONS = {
    "checkpoint_executor.payload": {"cloudpickle", "numpy", "torch", "sys"},  # values of theirs; nothing is opened
    "checkpoint_executor.elf": {"mmap"},  # one of the types that an image may be of
    "checkpoint_executor.health": {"logging"},  # says so when a listener fails
}


def _ours(found: Import) -> str | None:
    """The module of ours that is imported, None if it is not ours."""
    if not f"{found.module}.".startswith("checkpoint_executor."):
        return None
    names = {module.name for module in EVERY_MODULE} | {
        "checkpoint_executor.helper",
        "checkpoint_executor.workers",
        "checkpoint_executor.vllm",
    }
    # ``from checkpoint_executor import wire`` imports the module, ``from checkpoint_executor.wire import encode`` too.
    whole = f"{found.module}.{found.name}" if found.name else found.module
    return whole if whole in names else found.module


def _top(found: Import) -> str:
    return found.module.partition(".")[0]


def _is_below(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def _named(modules: list[Module]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "module", modules, ids=lambda module: module.name.removeprefix("checkpoint_executor.")
    )


def test_the_source_was_found() -> None:
    names = {module.name for module in EVERY_MODULE}
    assert {
        "checkpoint_executor.coordinator",
        "checkpoint_executor.helper.service",
        "checkpoint_executor.workers.service",
    } <= names
    assert {"checkpoint_executor.coordinator", "checkpoint_executor.messages", "checkpoint_executor.wire"} <= PURE


# ---------------------------------------------------------------------------------------------- docstrings


@_named([module for module in LIBRARY if not module.name.endswith("__init__")])
def test_every_module_of_the_library_says_whether_it_is_pure(module: Module) -> None:
    assert module.docstring.startswith(("PURE. ", "I/O. "))


@_named(EVERY_MODULE)
def test_every_module_says_what_it_knows(module: Module) -> None:
    assert module.docstring


# ---------------------------------------------------------------------------------------------- who imports whom


@_named([module for module in EVERY_MODULE if module.is_pure])
def test_a_pure_module_imports_only_pure_modules(module: Module) -> None:
    allowed = PURE_LIBRARIES | PURE_EXCEPTIONS.get(module.name, set())
    for found in module.imports:
        ours = _ours(found)
        if ours is None:
            assert _top(found) in allowed or found.typing_only, f"line {found.line}: {found.module} does I/O"
        else:
            assert ours in PURE or found.typing_only, f"line {found.line}: {ours} is not pure"


@_named(HELPER)
def test_the_helper_never_imports_the_workers(module: Module) -> None:
    assert [found for found in module.imports if _is_below(_ours(found) or "", "checkpoint_executor.workers")] == []


@_named(WORKERS)
def test_the_workers_never_import_the_helper(module: Module) -> None:
    assert [found for found in module.imports if _is_below(_ours(found) or "", "checkpoint_executor.helper")] == []


@_named(LIBRARY)
def test_the_library_never_imports_helper_or_workers_at_run_time(module: Module) -> None:
    for found in module.imports:
        ours = _ours(found) or ""
        for package in ("checkpoint_executor.helper", "checkpoint_executor.workers"):
            assert found.typing_only or not _is_below(ours, package), f"line {found.line}: {ours}"


@_named(EVERY_MODULE)
def test_nobody_imports_helper_or_workers_by_their_bare_names(module: Module) -> None:
    assert [found for found in module.imports if _top(found) in ("helper", "workers")] == []


@_named([*HELPER, *WORKERS])
def test_helper_and_workers_do_not_import_what_is_the_parents(module: Module) -> None:
    parents = {
        f"checkpoint_executor.{name}" for name in ("control", "executor", "processes", "transport", "coordinator")
    }
    assert [found for found in module.imports if _ours(found) in parents and not found.typing_only] == []


# ---------------------------------------------------------------------------------------------- who imports what


def _importers(modules: list[Module], *tops: str) -> set[str]:
    """Modules that import one of these libraries, or a part of one, at run time."""
    return {
        module.name.removeprefix("checkpoint_executor.")
        for module in modules
        for found in module.imports
        if any(_is_below(f"{found.module}.{found.name}", top) for top in tops) and not found.typing_only
    }


def test_the_transport_is_the_parents_only_import_of_zmq() -> None:
    # The others run in the children: our own, and vLLM's workers.
    assert _importers(EVERY_MODULE, "zmq") == {"transport", "child", "vllm.workers"}


def test_only_the_cuda_driver_imports_cuda_in_the_helper() -> None:
    assert _importers(HELPER, "cuda", "torch", "nccl") <= {"helper.cuda_driver"}


def test_only_cuda_modules_import_cuda_in_the_workers() -> None:
    importers = _importers(WORKERS, "cuda", "nccl", "torch.cuda")
    assert {name for name in importers if not name.startswith("workers.cuda_")} == set()


def test_the_library_imports_no_cuda() -> None:
    assert _importers(LIBRARY, "cuda", "nccl", "torch") <= {"payload"}


def test_only_the_front_door_of_vllm_imports_vllm() -> None:
    assert _importers([*LIBRARY, *HELPER, *WORKERS], "vllm") == set()


# ---------------------------------------------------------------------------------------------- what importing imports

HEAVY = ("torch", "cuda", "nccl", "zmq", "vllm", "cloudpickle", "numpy", "rich", "pynvml")


def imported_by(code: str, *libraries: str) -> list[str]:
    """Which of the libraries a fresh interpreter has imported after running this."""
    report = f"import json, sys; print(json.dumps([name for name in {libraries!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert imported_by("import checkpoint_executor", *HEAVY) == []


def test_importing_the_workers_base_class_imports_nothing_heavy() -> None:
    assert imported_by("from checkpoint_executor.workers import Worker, WorkerContext, execution", *HEAVY) == []


def test_the_executor_imports_zmq_and_nothing_of_cuda() -> None:
    code = "from checkpoint_executor import CUDACheckpointExecutor"
    assert imported_by(code, "torch", "cuda", "nccl", "vllm", "numpy", "cloudpickle") == []


@pytest.mark.parametrize("service", ["helper", "workers"])
def test_a_childs_service_imports_no_torch_and_no_cuda(service: str) -> None:
    code = f"import checkpoint_executor.{service}.service"
    assert imported_by(code, "torch", "cuda", "nccl", "vllm", "numpy", "cloudpickle") == []


@pytest.mark.parametrize("module", [module for module in LIBRARY if module.is_pure], ids=lambda module: module.name)
def test_a_pure_module_can_be_imported_alone(module: Module) -> None:
    assert imported_by(f"import {module.name}", *HEAVY) == []


# ---------------------------------------------------------------------------------------------- the suite itself


def test_a_test_that_hangs_fails(pytestconfig: pytest.Config) -> None:
    # "thread" would orphan children: it ends the process without running the fixtures' clean-up.
    assert 0 < float(pytestconfig.getini("timeout")) <= 300
    assert pytestconfig.getini("timeout_method") == "signal"
    assert pytestconfig.pluginmanager.hasplugin("timeout")


def test_nobody_imports_from_a_conftest() -> None:
    for path in (REPOSITORY / "tests").rglob("*.py"):
        module = _read(path, path.stem)
        assert [found for found in module.imports if "conftest" in f"{found.module}.{found.name}"] == [], path
