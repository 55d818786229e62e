"""What can be set, and where settings come from.

``ServerConfig`` and ``WorkerConfig`` are frozen, take keywords only, and are valid once they exist: a value that breaks
its rule raises ``ConfigError`` with the field, the value and the rule. Each setting is declared once (``settings.py``
has the kinds); its flag, its variable, its help text and its row in docs/configuration.md all come from that line.

Pure: no sockets, no threads, no clock. The environment is read when a config is built, and only then.
"""

from lmlive.config.server import ServerConfig
from lmlive.config.worker import WorkerConfig

__all__ = ["ServerConfig", "WorkerConfig"]
