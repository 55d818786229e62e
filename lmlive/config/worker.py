"""The settings of a worker or scheduler inside an engine's process; keywords only, no flags and no variables."""

from dataclasses import dataclass

from lmlive.config.settings import Setting, choice, seconds, switch


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How patient a worker is, and which way its KV travels; valid once it exists.

    Raises:
        ConfigError: A value breaks its rule; the error has ``field``, ``value`` and ``rule``.
    """

    connect_timeout: Setting[float, float] = Setting(1.0, seconds(above=0.0), "patience with one attempt to connect")
    lookup_timeout: Setting[float, float] = Setting(0.2, seconds(above=0.0), "patience with LOOKUP")
    request_timeout: Setting[float, float] = Setting(
        5.0, seconds(above=0.0), "deadline of a request that names none, and of entering"
    )
    heartbeat_interval: Setting[float, float] = Setting(10.0, seconds(above=0.0), "time between two PINGs")
    heartbeat_timeout: Setting[float, float] = Setting(5.0, seconds(above=0.0), "patience with one PING")
    heartbeat_start: Setting[str, str] = Setting(
        "first_request", choice("first_request", "register"), "what the first PING waits for"
    )
    mode: Setting[str, str] = Setting(
        "auto", choice("auto", "server_driven", later=("engine_driven",)), "who copies KV: the server or the engine"
    )
    strategy: Setting[str, str] = Setting(
        "auto", choice("auto", later=("shm", "inline")), "how KV travels where the engine copies it"
    )
    device: Setting[str, str] = Setting("auto", choice("auto", "host", later=("cuda", "fake-cuda")), "kind of memory")
    strict: Setting[bool, bool] = Setting(
        False, switch(), "raise where a request fails, instead of returning a result that says so"
    )
