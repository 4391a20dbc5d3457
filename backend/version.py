"""The version of this software; pyproject.toml reads it here."""

VERSION = "0.1.0"
