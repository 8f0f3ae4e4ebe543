"""The engine's version, and the version of its numbers."""

VERSION = "0.3.0"  # as in pyproject.toml
# Raised by a change after which a run would have other bits; its hashes are in the tests.
NUMERICS = 1
