"""The house: a module imports only from rooms to its right, and heavy libraries come in through few doors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cuflash"

# Left to right. A module imports only from later rooms; modules of one room do not import each other.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("support", "explanation", "distributed", "interop", "bench", "cache", "shared_prefix", "quantize"),
    ("decoding", "gradients", "weights"),
    ("api",),
    ("merge",),
    ("warm_decode",),
    ("warm",),
    ("problem",),
    ("device_pages",),
    ("edges",),
    ("options",),
    ("indices",),
    ("page_tables",),
    ("paged_batch",),
    ("pages", "page_arrays"),
    ("checks",),
    ("arrays",),
    ("planner",),
    ("backends",),
    ("jit", "launch", "staging", "structs"),
    ("tiles_backward_fp",),
    ("tiles_fp", "tiles_fa1", "tiles_fa3", "tiles_decode", "tiles_backward"),
    ("compiled", "tiles", "wgmma"),
    ("reference", "alibi", "device", "host", "tensor_map"),
    ("modifiers", "driver"),
    ("types",),
)
RANK = {module: rank for rank, room in enumerate(ROOMS) for module in room}

# Loaded at first use, never by importing a module of cuflash; the GPU and Numba kernels may, being loaded late themselves.
HEAVY = {"cupy", "cupyx", "torch", "jax", "numba", "scipy", "mpi4py", "cuda", "triton", "onnx", "tqdm", "matplotlib"}
LATE = (
    "backends/cpu", "backends/cuda", "backends/numba_cuda", "jit", "launch", "edges/torch_edge", "edges/jax_edge", "distributed/",
    "interop/", "bench/",
)  # fmt: skip


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The module or subpackage of cuflash that a file belongs to; "" for the package's own __init__.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def runtime_imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements that run (not those for type checkers), and whether they run when the module is imported."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, at_import
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            else:
                yield from walk(child, at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(tree, True)


def absolute_names(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """Dotted names that an import statement may load, "cuflash.planner" for ``from . import planner``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = ("cuflash", *path.relative_to(PACKAGE).parent.parts)
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
    return [f"{base}.{alias.name}" for alias in node.names]


def imported_rooms(path: Path) -> set[str]:
    """Rooms of cuflash that a file imports, at whatever time."""
    names = [name for node, _ in runtime_imports(ast.parse(path.read_text())) for name in absolute_names(node, path)]
    return {name.split(".")[1] for name in names if name.startswith("cuflash.")} & RANK.keys()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_has_a_room_and_imports_to_its_right(path):
    here = room(path)
    if here == "":
        assert not imported_rooms(path)  # it loads its rooms by name, late
        return
    assert here in RANK, f"{here} has no place in the house yet: give it one in ROOMS, in the room where it belongs"
    wrong = {other for other in imported_rooms(path) if other != here and RANK[other] <= RANK[here]}
    assert not wrong, f"{here} imports {sorted(wrong)}, which {'is' if len(wrong) == 1 else 'are'} not to its right"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_late(path):
    if str(path.relative_to(PACKAGE)).startswith(LATE):
        return
    at_import = [name for node, at in runtime_imports(ast.parse(path.read_text())) if at for name in absolute_names(node, path)]
    assert not {name.partition(".")[0] for name in at_import} & HEAVY


def test_the_checker_sees_what_it_must_see(tmp_path, monkeypatch):
    """A wrong import in each spelling is found; one for type checkers is none."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "backends").mkdir()
    path = tmp_path / "backends" / "bad.py"
    spellings = ("from .. import api", "from ..api import plan", "from cuflash import api", "import cuflash.api")
    for statement in (*spellings, "def f():\n    from ..api import plan"):
        path.write_text(statement)
        assert imported_rooms(path) == {"api"}, statement
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..api import attention")
    assert imported_rooms(path) == set()
    path.write_text("def f():\n    import numba")
    assert [at for _, at in runtime_imports(ast.parse(path.read_text()))] == [False]
