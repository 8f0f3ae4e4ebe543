"""The tokens of speed measurements: a file that nothing has to prepare or download."""

from __future__ import annotations

from measuring import Job, program

TOKENS = 4_194_304
VOCABULARY = 50257  # GPT-2's


def tokens_of(job: Job) -> list[str]:
    """Write the file if it isn't there, and return the settings that choose it."""
    size, vocabulary = (100_000, 256) if job.hour.dry else (TOKENS, VOCABULARY)
    path = job.hour.out / f"tokens_{vocabulary}.bin"
    if not path.is_file():
        job.run([*program("write_tokens"), path, str(size), str(vocabulary)])
    return [
        "data=shards",
        f"data.source.path={path}",
        f"data.source.vocab_size={vocabulary}",
        "val_tokens=1",
    ]
