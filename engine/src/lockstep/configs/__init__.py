"""Choices for any project: `hydra: searchpath: [pkg://lockstep.configs]` adds them."""
