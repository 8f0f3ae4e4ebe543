"""Evidence: whether a change helps, from runs in pairs."""
