"""Processes that train together: how they meet, speak, and wait."""
