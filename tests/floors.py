"""The rules of dependency, executable: an ``ast`` walk that names each offending line.

Floors: a module imports only from lower floors and from its own package. It does not matter where the import stands:
deferred into a function or hidden from the run time, it is an import.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FLOORS = {
    "_version": 0,
    "errors": 0,
    "clock": 0,
    "config": 1,
    "protocol": 1,
    "liveness": 1,
    "cache": 1,
    "device": 2,
    "tier.base": 2,
    "modules": 3,
    "tier": 3,
    "server": 4,
    "worker": 4,
    "cli": 5,
    "integrations": 5,
    "testing": 5,
    "server.__main__": 5,
    "": 5,  # the root
}
TOP = 5
# A worker knows nothing of the server's bookkeeping; a device knows neither verbs nor verdicts.
NEVER = {"worker": ("modules", "liveness", "tier"), "device": ("protocol", "liveness")}

IMPURE = ("asyncio", "zmq", "threading", "socket", "subprocess", "select", "selectors", "time", "random")
NO_STDLIB = {0: tuple(name for name in IMPURE if name != "time"), 1: IMPURE, 2: ("asyncio", "zmq")}
NO_STDLIB[3] = ("asyncio", "zmq", "threading")
NO_STDLIB_OF = {"tier": ("zmq",)}  # it blocks in threads of its own, and its clients may need a loop there
PURE_MAY_USE = {"protocol": {"msgpack"}, "cache": {"msgpack", "numpy", "xxhash"}}
HEAVY = ("torch", "transformers", "vllm")
# Extras: a module may be about one of these, if all others import that module inside a function.
EXTRAS = ("aiohttp", "prometheus_client", "rich", "valkey")
CLOCKS = {
    f"{name}{suffix}"
    for name in ("monotonic", "time", "perf_counter", "process_time", "thread_time", "clock_gettime")
    for suffix in ("", "_ns")
}
PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
PICKLING = {"recv_pyobj", "send_pyobj", "ProcessPoolExecutor"}
MOST_LINES = 400


class Import(NamedTuple):
    """One imported module, and where."""

    module: str
    line: int
    deferred: bool


@dataclass
class Module:
    """One file of the package."""

    name: str
    path: Path
    tree: ast.Module
    lines: int
    imports: list[Import] = field(default_factory=list)

    @property
    def area(self) -> str:
        """The part of the package that has a floor."""
        return area_of(self.name)


def area_of(name: str) -> str:
    """Give the part of the package that a module belongs to; empty for the root."""
    _, _, inner = name.partition(".")
    return inner if inner in FLOORS else inner.partition(".")[0]


def violations(root: Path) -> list[str]:
    """Check every file below a package's folder; each text begins with file:line."""
    modules: dict[str, Module] = {}
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        modules[name] = Module(name, path.relative_to(root.parent), ast.parse(text), text.count("\n"))
    for module in modules.values():
        module.imports = list(_imports(module, root.name, modules))
    eager = {one.module for module in modules.values() for one in module.imports if not one.deferred}
    for module in modules.values():
        for line, text in _judge(module, root.name, module.name in eager):
            found.append(f"{module.path}:{line}: {text}")
    return found + list(_cycles(modules))


def _imports(module: Module, package: str, known: dict[str, Module]) -> Iterator[Import]:
    deferred = {
        id(inner)
        for outer in ast.walk(module.tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(module.tree):
        late = id(node) in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, late)
                if alias.asname is None and alias.name.startswith(f"{package}."):
                    yield Import(package, node.lineno, late)  # binds the root's name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node, package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                # Only the root may say "from the root": it means its own submodules.
                names_submodule = inner in known and (base != package or not module.area)
                yield Import(inner if names_submodule else base, node.lineno, late)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno, late)


def _absolute(module: Module, node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts) or package


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _judge(module: Module, package: str, eager: bool) -> Iterator[tuple[int, str]]:
    if module.lines > MOST_LINES:
        yield module.lines, f"{module.lines} lines, at most {MOST_LINES}"
    if module.area not in FLOORS:
        yield 1, f"{module.area} has no floor"
        return
    for imported in module.imports:
        top = imported.module.partition(".")[0]
        text = _inside(module, imported, package) if top == package else _outside(module, imported, top, eager)
        if text:
            yield imported.line, text
    for node in ast.walk(module.tree):
        if text := _named(module, node):
            yield getattr(node, "lineno", 1), text


def _inside(module: Module, imported: Import, package: str) -> str:  # noqa: PLR0911  # one for each rule
    if imported.module == package:
        return "imports the package root: import the module that defines the name"
    mine, theirs = module.area, area_of(imported.module)
    if theirs not in FLOORS:
        return f"imports {imported.module}, which has no floor"
    if theirs == mine:
        return ""
    if theirs in NEVER.get(mine, ()):
        return f"{mine} must not know {theirs}: imports {imported.module}"
    here, there = FLOORS[mine], FLOORS[theirs]
    if there > here:
        return f"floor {here} ({mine}) imports upward from floor {there}: {imported.module}"
    if there == here and here < TOP:
        return f"{mine} and {theirs} share floor {here} and must not know each other: imports {imported.module}"
    return ""


def _outside(module: Module, imported: Import, top: str, eager: bool) -> str:
    floor = FLOORS[module.area]
    if top in PICKLERS:
        return f"pickles: imports {imported.module}"
    if top in NO_STDLIB_OF.get(module.area, NO_STDLIB.get(floor, ())):
        return f"floor {floor} ({module.area}) must not import {top}"
    heavy = top in HEAVY or (top in EXTRAS and eager)
    if heavy and not imported.deferred and module.area != "integrations":
        return f"imports {top} at module level: defer it into the function that needs it"
    if floor < 2 and top not in sys.stdlib_module_names and top not in PURE_MAY_USE.get(module.area, ()):
        return f"{module.area} is pure and must not import {top}"
    return ""


def _named(module: Module, node: ast.AST) -> str:  # noqa: PLR0911  # one for each rule
    """Judge a use of a name; imports of modules were judged before."""
    if isinstance(node, ast.ImportFrom) and node.module == "time":
        clocks = sorted(CLOCKS.intersection(alias.name for alias in node.names))
        return f"reads a clock ({', '.join(clocks)}): take a Clock" if clocks and module.area != "clock" else ""
    if isinstance(node, ast.ImportFrom | ast.Import):
        names = sorted(PICKLING.intersection(alias.name for alias in node.names))
        return f"pickles: {', '.join(names)}" if names else ""
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return "" if isinstance(node.value, ast.Constant) and node.value.value is False else "pickles: allow_pickle"
    if isinstance(node, ast.Name):
        if node.id == "TYPE_CHECKING" and module.area:
            return "hides an import under TYPE_CHECKING: move the type down"
        return f"pickles: {node.id}" if node.id in PICKLING else ""
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner == "time" and node.attr in CLOCKS and module.area != "clock":
            return f"reads a clock (time.{node.attr}): take a Clock"
        if node.attr in PICKLING or (owner == "torch" and node.attr == "load"):
            return f"pickles: {ast.unparse(node)}"
        if owner == "typing" and node.attr == "TYPE_CHECKING" and module.area:
            return "hides an import under TYPE_CHECKING: move the type down"
    return ""


def _cycles(modules: dict[str, Module]) -> Iterator[str]:
    """Name each import that closes a cycle, found depth first."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> Iterator[str]:
        path.append(name)
        for imported in modules[name].imports:
            if imported.module in path:
                cycle = [*path[path.index(imported.module) :], imported.module]
                if len(cycle) > 2:
                    yield f"{modules[name].path}:{imported.line}: closes the cycle {' -> '.join(cycle)}"
            elif imported.module in modules and imported.module not in done:
                yield from visit(imported.module)
        path.pop()
        done.add(name)

    for name in modules:
        if name not in done:
            yield from visit(name)
