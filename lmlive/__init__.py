"""lmlive: an asyncio-native KV-cache server for LLM inference workers that always knows which of them are alive.

These are the public names, and nothing else is: whatever is not listed here (or in ``lmlive.errors``,
``lmlive.testing``, ``lmlive.integrations``; and ``BlockingWorker`` and ``BlockingScheduler`` of
``lmlive.worker.blocking``) may change without notice.
Each name is imported when it is first asked for, so that ``import lmlive`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lmlive._version import __version__

if TYPE_CHECKING:
    from lmlive import errors, integrations, testing
    from lmlive.cache.layout import KVLayout
    from lmlive.config import ServerConfig, WorkerConfig
    from lmlive.device.memory import shared_empty
    from lmlive.errors import (
        ConfigError,
        DeviceError,
        ForkedProcess,
        HandleCloseError,
        HandleOpenError,
        InternalError,
        InvalidArgument,
        InvalidBlocks,
        InvalidHandle,
        InvalidLayout,
        InvalidPayload,
        LMLiveError,
        MessageTooLarge,
        NotOwner,
        ProtocolError,
        ReleasePending,
        RequestError,
        RequestTimeout,
        ServerBusy,
        ServerDraining,
        ServerStarting,
        ServerUnavailable,
        StaleEpoch,
        StaleGeneration,
        StartError,
        TransportError,
        UnknownInstance,
        UnknownLease,
        UnknownVerb,
        VersionError,
        WorkerClosed,
    )
    from lmlive.liveness.target import InstanceLivenessTarget
    from lmlive.server.server import LivenessServer
    from lmlive.server.status import ServerStatus
    from lmlive.worker.results import LookupResult, RetrieveResult, StoreResult
    from lmlive.worker.scheduler import Scheduler
    from lmlive.worker.worker import Worker

# Name -> module that defines it; a module that is public as a whole stands under its own name.
_MODULES = {
    "ConfigError": "lmlive.errors",
    "DeviceError": "lmlive.errors",
    "ForkedProcess": "lmlive.errors",
    "HandleCloseError": "lmlive.errors",
    "HandleOpenError": "lmlive.errors",
    "InstanceLivenessTarget": "lmlive.liveness.target",
    "InternalError": "lmlive.errors",
    "InvalidArgument": "lmlive.errors",
    "InvalidBlocks": "lmlive.errors",
    "InvalidHandle": "lmlive.errors",
    "InvalidLayout": "lmlive.errors",
    "InvalidPayload": "lmlive.errors",
    "KVLayout": "lmlive.cache.layout",
    "LMLiveError": "lmlive.errors",
    "LivenessServer": "lmlive.server.server",
    "LookupResult": "lmlive.worker.results",
    "MessageTooLarge": "lmlive.errors",
    "NotOwner": "lmlive.errors",
    "ProtocolError": "lmlive.errors",
    "ReleasePending": "lmlive.errors",
    "RequestError": "lmlive.errors",
    "RequestTimeout": "lmlive.errors",
    "RetrieveResult": "lmlive.worker.results",
    "Scheduler": "lmlive.worker.scheduler",
    "ServerBusy": "lmlive.errors",
    "ServerConfig": "lmlive.config",
    "ServerDraining": "lmlive.errors",
    "ServerStarting": "lmlive.errors",
    "ServerStatus": "lmlive.server.status",
    "ServerUnavailable": "lmlive.errors",
    "StaleEpoch": "lmlive.errors",
    "StaleGeneration": "lmlive.errors",
    "StartError": "lmlive.errors",
    "StoreResult": "lmlive.worker.results",
    "TransportError": "lmlive.errors",
    "UnknownInstance": "lmlive.errors",
    "UnknownLease": "lmlive.errors",
    "UnknownVerb": "lmlive.errors",
    "VersionError": "lmlive.errors",
    "Worker": "lmlive.worker.worker",
    "WorkerClosed": "lmlive.errors",
    "WorkerConfig": "lmlive.config",
    "shared_empty": "lmlive.device.memory",
}
_SUBMODULES = ("errors", "integrations", "testing")

__all__ = [
    "ConfigError",
    "DeviceError",
    "ForkedProcess",
    "HandleCloseError",
    "HandleOpenError",
    "InstanceLivenessTarget",
    "InternalError",
    "InvalidArgument",
    "InvalidBlocks",
    "InvalidHandle",
    "InvalidLayout",
    "InvalidPayload",
    "KVLayout",
    "LMLiveError",
    "LivenessServer",
    "LookupResult",
    "MessageTooLarge",
    "NotOwner",
    "ProtocolError",
    "ReleasePending",
    "RequestError",
    "RequestTimeout",
    "RetrieveResult",
    "Scheduler",
    "ServerBusy",
    "ServerConfig",
    "ServerDraining",
    "ServerStarting",
    "ServerStatus",
    "ServerUnavailable",
    "StaleEpoch",
    "StaleGeneration",
    "StartError",
    "StoreResult",
    "TransportError",
    "UnknownInstance",
    "UnknownLease",
    "UnknownVerb",
    "VersionError",
    "Worker",
    "WorkerClosed",
    "WorkerConfig",
    "__version__",
    "errors",
    "integrations",
    "shared_empty",
    "testing",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; it is an ordinary attribute from then on."""
    if name in _SUBMODULES:
        return importlib.import_module(f"lmlive.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'lmlive' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
