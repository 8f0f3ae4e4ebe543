"""Hugging Face: exports a run as a folder for transformers; starts a run from such a folder."""
