"""Lightning callbacks: each takes part in a run by itself."""
