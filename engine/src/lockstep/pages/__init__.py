"""Shows a run: a report of it, and its all-reduces, as pages that a browser opens."""
