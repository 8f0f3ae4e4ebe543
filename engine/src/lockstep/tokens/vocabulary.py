"""How many tokens a source of a configuration has, without its text if settings say it."""

from omegaconf import DictConfig, OmegaConf

from lockstep.building import build
from lockstep.errors import UserError
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.tokenizer import ByteTokenizer
from lockstep.tokens.tokenizer_files import GPT2, GPT2_SIZE


def size_of(source: DictConfig) -> int:
    """Return the number of token ids of a node `data.source`.

    Raises:
        UserError: a setting that chooses the text is missing.
    """
    size: int | None = source.get("vocab_size")
    tokenizer = source.get("tokenizer")
    if size is not None:
        return size
    if tokenizer == ByteTokenizer.kind:
        return ByteTokenizer.vocab_size
    if tokenizer in GPT2:
        return GPT2_SIZE  # without its files
    missing = sorted(OmegaConf.missing_keys(source))
    if missing:
        raise UserError(f"{missing[0]}=??? leaves the text open; set it")
    built = build(source)
    known: int | None = getattr(built, "vocab_size", None)
    return known or recipe_of(built).tokenizer.vocab_size
