"""Checkpoints on disk: written whole, verified, copied, and read."""
