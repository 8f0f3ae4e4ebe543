"""Numbers that do not depend on how samples are spread, and their files."""
