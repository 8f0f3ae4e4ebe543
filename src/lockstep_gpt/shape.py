"""The limits of a model's shape; nothing here imports torch."""

from typing import Any

from lockstep.settings import check, check_number, check_switch, check_whole

VOCAB_MULTIPLE = 64  # matrix products are fast at sizes that tensor cores divide evenly
MOST_LAYERS = 10_000


def check_shape(
    vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int, dropout: float
) -> None:
    """Raise a `UserError` for a shape that no model can have."""
    rule = "is not known; give the data module an attribute vocab_size"
    check("vocab_size", vocab_size, vocab_size is not None, rule)
    check_whole("vocab_size", vocab_size, at_least=1)
    check_whole("model.block_size", block_size, at_least=1)
    check_whole("model.n_layer", n_layer, at_least=1, at_most=MOST_LAYERS)
    check_whole("model.n_head", n_head, at_least=1)
    check_whole("model.n_embd", n_embd, at_least=1)
    check_number("model.dropout", dropout, at_least=0, below=1)
    check_heads(n_head, n_embd)


def check_switches(**switches: Any) -> None:
    """Raise a `UserError` for an argument of a model, by its name, that is not true or false."""
    for name, value in switches.items():
        check_switch(f"model.{name}", value)


def check_heads(n_head: int, n_embd: int, n_kv_head: int | None = None) -> None:
    """Raise a `UserError` unless heads divide the width evenly, and share keys and values evenly.

    Args:
        n_head: of queries.
        n_embd: the width that they divide.
        n_kv_head: of keys and values; None: as many as of queries.
    """
    if n_kv_head is not None:
        check_whole("model.n_kv_head", n_kv_head, at_least=1)
        rule = f"does not divide model.n_head={n_head}; set a divisor of it"
        check("model.n_kv_head", n_kv_head, n_head % n_kv_head == 0, rule)
    nearest = n_head * max(1, round(n_embd / n_head))
    rule = f"is not divisible by model.n_head={n_head}; nearest: model.n_embd={nearest}"
    check("model.n_embd", n_embd, n_embd % n_head == 0, rule)
