"""Write a file of tokens for `data=shards`: `write_tokens.py FILE TOKENS VOCABULARY`."""

from __future__ import annotations

import sys
from pathlib import Path

from zipf import zipf


def main() -> None:
    """Write it; a reader never sees half of the file."""
    path = Path(sys.argv[1])
    size, vocabulary = map(int, sys.argv[2:])
    unfinished = path.with_suffix(".unfinished")
    zipf(size, vocabulary).astype("<u2").tofile(unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
