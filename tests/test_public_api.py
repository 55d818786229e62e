import importlib
import inspect
import json
import subprocess
import sys
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import pytest

import lmlive
from lmlive import errors

PROMISED = {
    "LivenessServer", "ServerConfig", "ServerStatus", "Worker", "WorkerConfig", "Scheduler", "StoreResult",
    "RetrieveResult", "LookupResult", "KVLayout", "InstanceLivenessTarget", "shared_empty", "errors", "testing",
    "__version__",
}  # fmt: skip
HEAVY = {"asyncio", "zmq", "numpy", "torch", "aiohttp", "transformers", "msgpack", "uvloop", "logging", "argparse"}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def error_names() -> set[str]:
    return {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.LMLiveError)
    }


def test_the_promised_names_are_public() -> None:
    assert set(lmlive.__all__) >= PROMISED | error_names()
    assert len(set(lmlive.__all__)) == len(lmlive.__all__)
    assert sorted(lmlive.__all__) == dir(lmlive)


@pytest.mark.parametrize("name", lmlive.__all__)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(lmlive, name)
    if name == "__version__":
        assert value == metadata.version("lmlive")
        return
    assert inspect.getdoc(value)
    if not inspect.ismodule(value):
        assert value.__name__ == name
        assert value.__module__.startswith("lmlive.")


@pytest.mark.parametrize("name", [name for name in lmlive.__all__ if name != "__version__"])
def test_public_methods_are_documented(name: str) -> None:
    value = getattr(lmlive, name)
    if not inspect.isclass(value):
        return
    bare = [
        attribute
        for attribute, member in vars(value).items()
        if not attribute.startswith("_") and callable(member) and not inspect.getdoc(member)
    ]
    assert bare == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lmlive.no_such_name


def test_importing_it_imports_nothing_heavy() -> None:
    bare = modules_after("pass")
    added = modules_after("import lmlive") - bare
    assert not {name for name in added if name.partition(".")[0] in HEAVY}
    assert {name for name in added if name.startswith("lmlive")} == {"lmlive", "lmlive._version"}


@pytest.mark.parametrize("name", ["LivenessServer", "Worker", "Scheduler", "shared_empty", "KVLayout"])
def test_no_public_name_needs_torch_or_aiohttp(name: str) -> None:
    loaded = modules_after(f"from lmlive import {name}")
    assert not loaded & {"torch", "aiohttp", "transformers", "prometheus_client", "rich"}


def test_every_way_to_a_name_gives_the_same_object() -> None:
    for name in lmlive.__all__:
        value = getattr(lmlive, name)
        if inspect.isclass(value):
            assert getattr(importlib.import_module(value.__module__), name) is value


def test_it_is_typed() -> None:
    assert files("lmlive").joinpath("py.typed").is_file()
    listed = Path(lmlive.__file__).read_text()
    # What a type checker sees and what is imported at run time come from two lists: they must agree.
    for name in set(lmlive.__all__) - {"__version__"}:
        assert listed.count(name) >= 3, f"{name} is missing from a list in lmlive/__init__.py"
