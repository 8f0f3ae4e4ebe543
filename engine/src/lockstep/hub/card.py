"""The model card: what the model is, what it was trained on, and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lockstep import project
from lockstep.checkpoints.content import samples_of
from lockstep.damaged_files import read_informative_object
from lockstep.hub.layout import Model
from lockstep.loggers.tracking import git_state
from lockstep.run.directory import settled

# Settings that determine the weights.
GROUPS = ("model", "data", "optim", "schedule", "batch")
SINGLE = ("seed", "max_steps", "precision", "clip_norm", "lr_scaling")


def mark() -> str:
    """Return the line that identifies a folder as an export."""
    return f"Trained and exported by `{project.program()}`."


def model_card(content: dict[str, Any], model: Model, source: Path, code: Path | None) -> str:
    """Return README.md of an exported checkpoint.

    Args:
        content: the checkpoint's content.
        model: the model in it.
        source: the checkpoint's file.
        code: the file that transformers needs to load it, if any.
    """
    config = settled(content["config"])
    name = _name(source)
    trust = ", trust_remote_code=True" if code else ""
    rows = "\n".join(
        f"| {fact} | {value} |" for fact, value in _facts(content, config, model, source)
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

{mark()}

| | |
|---|---|
{rows}

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelForCausalLM.from_pretrained(folder{trust})
tokens = tokenizer("def f(x, y):", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=16)[0]))
```

## Settings

```yaml
{_settings(config)}```
"""


def _name(source: Path) -> str:
    """Return the name of the checkpoint's run, or else of its folder."""
    folder = source.resolve().parent
    if folder.name == "checkpoints":
        folder = folder.parent
    return folder.name


def _facts(
    content: dict[str, Any], config: dict[str, Any], model: Model, source: Path
) -> list[tuple[str, str]]:
    loss = _validation_loss(content)
    step = content.get("global_step")
    tokens = _tokens_seen(content, model)
    size = f"{model.num_parameters:,} parameters, vocabulary of {model.vocab_size:,} tokens"
    seen = f"{tokens:,} in {step:,} steps" if tokens is not None else "not known"
    measured = f"{loss:.4f} nats per token" if loss is not None else "not measured"
    return [
        ("model", f"{size}, context of {model.block_size}"),
        ("data", _data(config["data"])),
        ("tokens seen", seen),
        ("validation loss", measured),
        ("checkpoint", f"`{source.name}`"),
        ("code", _revision(source)),
    ]


def _tokens_seen(content: dict[str, Any], model: Model) -> int | None:
    """Return how many tokens the run has trained on."""
    samples = samples_of(content)
    return None if samples is None else samples * model.block_size


def _validation_loss(content: dict[str, Any]) -> float | None:
    """Return the validation loss at the checkpoint's step, or None if it wasn't measured."""
    for state in content.get("callbacks", {}).values():
        loss = state.get("losses", {}).get(content.get("global_step"))
        if loss is not None:
            return float(loss)
    return None


def _data(settings: dict[str, Any]) -> str:
    """Return the class of the source, and what it reads."""
    source = settings.get("source") or settings
    kind = str(source.get("_target_")).rpartition(".")[2]
    return ", ".join([kind, *(str(source[n]) for n in ("path", "tokenizer") if source.get(n))])


def _revision(source: Path) -> str:
    """Return the revision that the run recorded, or else that of the exporting code."""
    path = source.resolve().parent.parent / "environment.json"
    when = "trained"
    state = read_informative_object(path)
    if not {"git_revision", "git_dirty"} <= state.keys():
        when = "exported"
        state = git_state(project.folder())
    if not state:
        return "not in git"
    changed = ", with changes that are not in it" if state["git_dirty"] else ""
    return f"revision `{state['git_revision']}` when {when}{changed}"


def _settings(config: dict[str, Any]) -> str:
    """Return the settings that determined the weights; others may be private."""
    chosen = {name: config[name] for name in (*SINGLE, *GROUPS) if config.get(name) is not None}
    return yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
