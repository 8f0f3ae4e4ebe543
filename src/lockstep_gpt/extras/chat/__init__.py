"""Conversations: fine-tunes a model on them, talks to it, and serves it."""
