"""Measures a trained module on held-out data, and a language model on any text."""
