"""`model=auto` on a command line: overrides for all that its size decides."""

import re
from typing import Any

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.cluster.rules import rules
from lockstep_gpt.launch.compose import register_resolver
from lockstep_gpt.settings import as_typed, check

SIZE, LENGTH = "1M", "64"  # as in configs/model/auto.yaml of this extra
RESOLVER = "by_size"
OF_MUON = ("optim.", "batch.reference_size")  # another optimizer's rates are not known
# If a command sets one of a pair, the other is not added.
EITHER = {"max_steps": "max_tokens", "optim.warmup_steps": "optim.warmup_tokens"}


def with_rules(words: list[str]) -> list[str]:
    """Return a command's overrides with those that follow from its size; its own take precedence.

    As overrides, they replace what an experiment sets, which itself replaces a model's choice.
    """
    register_resolver(RESOLVER, _by_size, replace=True)
    names = [word.lstrip("+").partition("=")[0] for word in words]
    values = [word.partition("=")[2].strip("'\"") for word in words]
    settings = dict(zip(names, values, strict=True))
    is_auto = settings.get("model") == "auto"
    size = settings.get("size.weights", SIZE)
    is_allowed = is_auto or "size.weights" not in settings
    check("size.weights", size, is_allowed, "needs model=auto; add that")
    if not is_auto:
        return words
    ruled = {"optim": "muon", "model.block_size": LENGTH, **_values(settings)}
    left_out: tuple[str, ...] = ()
    if settings.get("optim", "muon") != "muon":
        left_out = OF_MUON
    added = [
        f"{name}={value}"
        for name, value in ruled.items()
        if name not in settings and not name.startswith(left_out)
    ]
    place = names.index("model") + 1  # Hydra needs all overrides in sequence
    return [*words[:place], *added, *words[place:]]


def _values(settings: dict[str, str]) -> dict[str, str]:
    """Return setting -> value as typed; in a sweep over sizes, each job resolves its own."""
    size = settings.get("size.weights", SIZE)
    length = settings.get("model.block_size", LENGTH)
    swept = re.search(r"[,(]", size + length) is not None
    if swept and settings.get("resume") == "auto":
        raise UserError(
            f"size.weights={size} is a sweep, which resume=auto cannot continue; continue each run "
            "in its own folder: run_dir=SWEEP/0 resume=auto"
        )
    values = rules(SIZE, int(LENGTH)) if swept else _by_words(size, length)
    for name, other in EITHER.items():
        if name in settings:
            del values[other]
    if swept:
        return {name: f"'${{{RESOLVER}:{name}}}'" for name in values}
    return {name: as_typed(value) for name, value in values.items()}


def _by_words(size: str, length: str) -> dict[str, Any]:
    fits = length.isdecimal() and int(length) > 0
    check("model.block_size", length, fits, "must be a whole number of at least 1")
    return rules(size, int(length))


def _by_size(name: str, *, _root_: Any) -> Any:
    """Return the value of one setting, for a file or a sweep that asks for it."""
    return rules(str(_root_.size.weights), _root_.model.block_size)[name]
