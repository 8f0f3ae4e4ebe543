"""The limits of a model's shape; nothing here imports torch."""

from lockstep_gpt.settings import check

VOCAB_MULTIPLE = 64  # matrix products are fast at sizes that tensor cores divide evenly
MOST_LAYERS = 10_000


def check_shape(
    vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int, dropout: float
) -> None:
    """Raise a `UserError` for a shape that no model can have."""
    check("vocab_size", vocab_size, vocab_size >= 1, "must be at least 1")
    sizes = {"block_size": block_size, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    for name, size in sizes.items():
        check(f"model.{name}", size, size >= 1, "must be at least 1")
    check("model.n_layer", n_layer, n_layer <= MOST_LAYERS, f"must be at most {MOST_LAYERS}")
    check("model.dropout", dropout, 0 <= dropout < 1, "must be at least 0 and below 1")
    check_heads(n_head, n_embd)


def check_heads(n_head: int, n_embd: int, n_kv_head: int | None = None) -> None:
    """Raise a `UserError` unless heads divide the width evenly, and share keys and values evenly.

    Args:
        n_head: of queries.
        n_embd: the width that they divide.
        n_kv_head: of keys and values; None: as many as of queries.
    """
    if n_kv_head is not None:
        check("model.n_kv_head", n_kv_head, n_kv_head >= 1, "must be at least 1")
        rule = f"does not divide model.n_head={n_head}"
        check("model.n_kv_head", n_kv_head, n_head % n_kv_head == 0, rule)
    nearest = n_head * max(1, round(n_embd / n_head))
    rule = f"is not divisible by model.n_head={n_head}; nearest: model.n_embd={nearest}"
    check("model.n_embd", n_embd, n_embd % n_head == 0, rule)
