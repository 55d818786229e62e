"""The version, in one place that imports nothing; pyproject.toml reads it from here."""

__version__ = "0.1.0"
