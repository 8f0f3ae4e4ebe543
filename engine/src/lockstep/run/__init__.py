"""One run: its directory, lock, frozen configuration, and end."""
