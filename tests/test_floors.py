import ast
import re
from pathlib import Path

import pytest

import lmlive
from tests.floors import FLOORS, MOST_LINES, violations

PACKAGE = Path(lmlive.__file__).parent

# A file, its content, and what must be said about it.
SEEDED = [
    ("errors.py", "import asyncio", "errors.py:1: floor 0 (errors) must not import asyncio"),
    ("clock.py", "import zmq", "clock.py:1: floor 0 (clock) must not import zmq"),
    ("errors.py", "from lmlive.config import x", "errors.py:1: floor 0 (errors) imports upward from floor 1"),
    ("config/x.py", "\nimport lmlive.protocol.codec as c", "x.py:2: config and protocol share floor 1"),
    ("protocol/x.py", "from lmlive.liveness import roster", "protocol and liveness share floor 1"),
    ("liveness/x.py", "from ..cache import store", "liveness and cache share floor 1"),
    (
        "cache/x.py",
        "def f():\n    from lmlive.device import host",
        "x.py:2: floor 1 (cache) imports upward from floor 2",
    ),
    *(
        ("liveness/x.py", f"import {name}", f"floor 1 (liveness) must not import {name}")
        for name in ("asyncio", "zmq", "threading", "socket", "time", "random", "subprocess")
    ),
    ("liveness/x.py", "import numpy", "liveness is pure and must not import numpy"),
    ("config/x.py", "import msgpack", "config is pure and must not import msgpack"),
    ("device/x.py", "from asyncio import run", "floor 2 (device) must not import asyncio"),
    ("device/x.py", "from lmlive.protocol.verbs import Verb", "device must not know protocol"),
    ("device/x.py", "from lmlive.modules import call", "floor 2 (device) imports upward from floor 3"),
    *(("modules/x.py", f"import {name}", f"must not import {name}") for name in ("asyncio", "zmq", "threading")),
    ("modules/x.py", "from lmlive.server.router import Router", "floor 3 (modules) imports upward from floor 4"),
    ("server/x.py", "from lmlive.worker import link", "server and worker share floor 4"),
    ("worker/x.py", "from lmlive.server import lanes", "worker and server share floor 4"),
    ("worker/x.py", "from lmlive.modules.books import Books", "worker must not know modules"),
    ("server/x.py", "from lmlive.server.__main__ import main", "floor 4 (server) imports upward from floor 5"),
    ("server/x.py", "from lmlive.testing.clock import ManualClock", "floor 4 (server) imports upward from floor 5"),
    (
        "server/x.py",
        "import importlib\nimportlib.import_module('lmlive.cli')",
        "x.py:2: floor 4 (server) imports upward",
    ),
    ("server/x.py", "import lmlive", "x.py:1: imports the package root"),
    ("server/x.py", "from lmlive import errors", "imports the package root"),
    ("server/x.py", "from .. import errors", "imports the package root"),
    ("server/x.py", "import lmlive.errors", "imports the package root"),
    ("helpers.py", "", "helpers.py:1: helpers has no floor"),
    ("server/x.py", "from lmlive.helpers import y", "which has no floor"),
    ("server/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING: pass", "x.py:2: hides an import"),
    ("server/x.py", "import typing\nif typing.TYPE_CHECKING: pass", "x.py:2: hides an import"),
    ("server/x.py", "import time\n\ntime.monotonic()", "x.py:3: reads a clock (time.monotonic)"),
    ("testing/x.py", "from time import monotonic_ns as now", "reads a clock (monotonic_ns)"),
    ("worker/x.py", "import time\nt = time.perf_counter", "x.py:2: reads a clock (time.perf_counter)"),
    *(
        ("server/x.py", f"def f():\n    import {name}", f"x.py:2: pickles: imports {name}")
        for name in ("pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing.reduction")
    ),
    ("server/x.py", "s.recv_pyobj()", "pickles: s.recv_pyobj"),
    ("server/x.py", "s.send_pyobj(1)", "pickles: s.send_pyobj"),
    ("worker/x.py", "def f():\n    import torch\n    torch.load('x')", "x.py:3: pickles: torch.load"),
    ("cache/x.py", "import numpy\nnumpy.load('x', allow_pickle=True)", "x.py:2: pickles: allow_pickle"),
    ("server/x.py", "from concurrent.futures import ProcessPoolExecutor", "pickles: ProcessPoolExecutor"),
    *(
        ("worker/x.py", f"try:\n    import {name}\nexcept ImportError: pass", f"x.py:2: imports {name} at module level")
        for name in ("torch", "transformers", "vllm")
    ),
    ("server/x.py", "import aiohttp", "x.py:1: imports aiohttp at module level"),
    ("server/x.py", "\n" * (MOST_LINES + 1), f"{MOST_LINES + 1} lines, at most {MOST_LINES}"),
    (
        "server/x.py",
        "from lmlive.server.y import a",
        "closes the cycle lmlive.server.x -> lmlive.server.y -> lmlive.server.x",
    ),
]

# Beside a seeded module: one that imports it, inside a function and at module level.
OTHERS = {"server/y.py": "def f():\n    from lmlive.server import x\n", "server/z.py": "from lmlive.server import x"}

CLEAN = {
    "clock.py": "import time\n\nnow = time.monotonic()",
    "protocol/x.py": "import msgpack\nimport struct\nfrom lmlive.errors import E\nfrom lmlive.protocol import y",
    "cache/x.py": "import numpy\nnumpy.load('x', allow_pickle=False)",
    "device/x.py": "import ctypes\nfrom lmlive.cache.layout import L\ndef f():\n    import torch",
    "server/x.py": "import asyncio\nimport zmq\nimport time\nfrom lmlive.modules.books import B\ntime.sleep(0)",
    "worker/x.py": "import threading\nfrom lmlive.cache.keys import k\nfrom lmlive.device.memory import m",
    "server/__main__.py": "from lmlive.server.x import y",
    "cli/x.py": "from lmlive.server.__main__ import main\nfrom lmlive.worker.x import y",
    "integrations/x.py": "import torch\nimport transformers",
    "testing/x.py": "from lmlive.server.x import y",
    "server/http.py": "import aiohttp",
    "server/y.py": "def f():\n    import lmlive.server.http as http",
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lmlive.server.x import y",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "lmlive"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_package_keeps_its_floors() -> None:
    assert not (found := violations(PACKAGE)), "\n" + "\n".join(found)


def test_one_module_reads_the_clock() -> None:
    assert "time.monotonic()" in (PACKAGE / "clock.py").read_text()
    assert not [text for text in violations(PACKAGE) if "reads a clock" in text]


def test_no_name_is_an_empty_word() -> None:
    # docs/glossary.md has better ones.
    empty = re.compile(r"manager|helper|util|cleanup", re.IGNORECASE)
    named = [
        f"{path}:{node.lineno}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and empty.search(node.name)
    ]
    assert named == []
    assert [path for path in PACKAGE.rglob("*.py") if empty.search(path.stem)] == []


def test_every_folder_has_a_floor_and_is_a_package() -> None:
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} <= FLOORS.keys()
    assert [path for path in folders if not (path / "__init__.py").exists()] == []


@pytest.mark.parametrize(("name", "text", "expected"), SEEDED, ids=lambda value: str(value)[:50])
def test_a_seeded_violation_is_named(name: str, text: str, expected: str, tmp_path: Path) -> None:
    found = violations(write(tmp_path, {**OTHERS, name: text}))
    assert [line for line in found if expected in line], found
    assert all(line.startswith("lmlive/") for line in found)


def test_what_is_allowed_is_not_named(tmp_path: Path) -> None:
    assert violations(write(tmp_path, CLEAN)) == []
