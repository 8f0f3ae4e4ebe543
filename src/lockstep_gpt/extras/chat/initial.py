"""`${initial:NAME}`: settings that a fine-tuned model must share with its initial weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.compose import register_resolver
from lockstep_gpt.run.directory import RunDirectory

INITIAL = "from_weights/initial"
NEEDY = ("experiment=chat", f"model={INITIAL}")
SWEPT = re.compile("[,'\"$]")  # not one plain path
CONTEXT = 256  # tokens of a conversation, if the positions aren't learned
LEARNED = "gpt"  # the architecture with learned positions: it has no others
DEFAULTS = {"n_kv_head": None, "ngram_rows": 0, "longest_ngram": 2}
# In config.json: its model_type -> our architecture, and its name of the context.
KNOWN = {"gpt2": (LEARNED, "n_positions"), "modern_gpt": ("modern", "block_size")}


def with_initial(words: list[str]) -> list[str]:
    """Return a command's overrides, for `experiment=chat` with the shape of the initial weights.

    Raises a `UserError` if these are not there: a reference to them would hide the error in
    Hydra's own.
    """
    register_resolver("initial", _resolved, replace=True)
    settings = [word.lstrip("+").partition("=")[0] for word in words]
    names = {name: word.partition("=")[2] for name, word in zip(settings, words, strict=True)}
    source = names.get("model.init_from")
    needy_words = [word for word in NEEDY if word in words]
    if "resume=auto" in words:
        return words
    if needy_words and source is None and names.get("model") in (None, INITIAL):
        raise _missing_init_from(f"{needy_words[0]} needs")
    if "model" not in names and "chat" in _listed(names.get("experiment", "")):
        # Here, and not in the experiment's file: Hydra 1.4 reads an override of a group within a
        # group as one of a group that doesn't exist.
        place = settings.index("experiment")  # Hydra wants overrides next to each other
        words = [*words[:place], f"model={INITIAL}", *words[place:]]
        names["model"] = INITIAL
    if source not in (None, "null") and not SWEPT.search(source) and names.get("model") == INITIAL:
        shape_of(source)
    return words


def _listed(choice: str) -> list[str]:
    """Return the names in a choice such as `chat` or `[chat,mine]`; none of a sweep's."""
    names = re.split(r"[\s'\",]+", choice.strip().removeprefix("[").removesuffix("]"))
    return names if choice.startswith("[") or len(names) == 1 else []


def _missing_init_from(why: str) -> UserError:
    return UserError(f"{why} model.init_from; set it to a run, or to a transformers folder")


def _resolved(name: str, *, _root_: Any) -> Any:
    source = _root_.model.get("init_from")
    if source is None:
        raise _missing_init_from(f"model={INITIAL} needs")
    if name == "tokenizer":
        return source
    shape = shape_of(source)
    if name == "context":
        size = shape["block_size"]
        return size if shape["architecture"] == LEARNED else max(CONTEXT, size)
    return shape.get(name, DEFAULTS.get(name))


def shape_of(source: str) -> dict[str, Any]:
    """Return the settings of the model whose weights `model.init_from` names.

    Raises:
        UserError: it is neither a run, a checkpoint in one, nor a folder for transformers.
    """
    path = Path(source).expanduser()
    run = path.parent.parent if path.is_file() else path
    if (run / "config.yaml").is_file():
        return dict(RunDirectory(run).values()["model"])
    try:
        saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
        architecture, context = KNOWN[saved["model_type"]]
        biased = {"bias": architecture == LEARNED, "block_size": saved[context]}
        return {**saved, "architecture": architecture, **biased}
    except OSError:
        reason = "is neither a run, a checkpoint in one, nor a folder with config.json"
    except (ValueError, LookupError, TypeError):
        reason = f"has a config.json of none of {', '.join(KNOWN)}"
    raise UserError(f"model.init_from={source} {reason}; give one")
