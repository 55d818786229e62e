"""Workers and schedulers for tests: small caches, short patience, and the requests a fake server saw of them."""

from typing import Any

import numpy as np

from lmlive.config import WorkerConfig
from lmlive.device.memory import shared_empty
from lmlive.worker.worker import Worker

BLOCKS = 64
BLOCK_TOKENS = 16
TOKENS = list(range(200))  # three whole chunks of a fake server, and a tail
IDS = list(range(13))


def fast(**more: Any) -> WorkerConfig:
    """Give a config whose beats come quickly and whose patience is short, but long enough for a busy machine."""
    settings: dict[str, Any] = {
        "connect_timeout": 0.3,
        "request_timeout": 1.0,
        "heartbeat_interval": 0.05,
        "heartbeat_timeout": 0.5,
        **more,
    }
    return WorkerConfig(**settings)


def cache() -> dict[str, Any]:
    """Give a cache of shared memory with recognisable contents."""
    tensor = shared_empty((BLOCKS, BLOCK_TOKENS, 8), np.float32)
    tensor[...] = np.arange(tensor.size).reshape(tensor.shape)
    return {"layer": tensor}


def make(url: str, kv_caches: Any = None, **more: Any) -> Worker:
    """Give a worker of the model "m"."""
    config = more.pop("config", None) or fast()
    kv_caches = cache() if kv_caches is None else kv_caches
    return Worker(url, kv_caches=kv_caches, block_tokens=BLOCK_TOKENS, model="m", config=config, **more)
