PROGRAM = "lockstep-gpt"
VERSION = "0.1.0"  # as in pyproject.toml
