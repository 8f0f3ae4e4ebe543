"""What trackers get of a run, and what happens when one hangs."""
