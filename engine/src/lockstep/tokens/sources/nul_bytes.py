"""NUL bytes: in a file they mean that it isn't text, and in a text they may end it."""

from lockstep.errors import UserError
from lockstep.tokens.tokenizer import ByteTokenizer


def refuse_nul(texts: list[bytes], tokenizer: str, path: str) -> None:
    """Raise a `UserError` if a text has a NUL byte, with which `tokenizer=bytes` ends texts.

    Args:
        texts: documents of one file.
        tokenizer: the setting `tokenizer`; others have an id for NUL.
        path: the file.
    """
    if tokenizer != ByteTokenizer.kind or b"\0" not in b"".join(texts):
        return
    text = next(text for text in texts if b"\0" in text)
    raise UserError(
        f"{path} of the corpus has a text with a NUL byte, which ends a document with "
        f"tokenizer=bytes; remove it from {text[:60]!r}, or choose another tokenizer"
    )


def refuse_binary(piece: bytes, path: str) -> None:
    """Raise a `UserError` if a piece of a file contains NUL bytes, as binary data and UTF-16 do."""
    if b"\0" in piece:
        raise UserError(f"{path} is not text: it has NUL bytes; remove it, or save it as UTF-8")
