"""Private names of libraries: a file per library, each with its reason."""
