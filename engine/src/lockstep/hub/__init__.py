"""Hugging Face: folders that transformers loads, and weights from such folders."""
