"""The server over HTTP, for people and probes; nothing here is needed by workers, and none of it without ``ops``."""
