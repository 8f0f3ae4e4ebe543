"""The template of a chat in an export: transformers' `apply_chat_template` gives our ids."""

from __future__ import annotations

import json
from typing import Any

from lockstep_gpt.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer
from lockstep_gpt.extras.chat.template import (
    OURS,
    ROLES,
    Template,
    markers_of,
    template_of,
)

Files = dict[str, dict[str, Any]]  # name -> content, as JSON
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def chat_files(tokenizer: Tokenizer, files: Files) -> Files:
    """Return the files that differ for a model of conversations; `files` are those without it."""
    template = template_of(tokenizer)
    changed: Files = {
        # In a conversation, the template rejects special tokens in texts.
        "tokenizer_config.json": {"chat_template": jinja(template), "split_special_tokens": False},
        "generation_config.json": {"eos_token_id": sorted(template.stop, reverse=True)},
    }
    if tokenizer.to_dict()["kind"] == ByteTokenizer.kind:
        changed["tokenizer.json"] = _named(files["tokenizer.json"], markers_of(tokenizer))
    return {name: {**files[name], **changes} for name, changes in changed.items()}


def jinja(template: Template) -> str:
    """Return the template in the language of transformers."""
    markers = [*markers_of(template.tokenizer), END_OF_TEXT]
    words = {token: word for word, token in markers_of(template.tokenizer).items()}
    text = "message['content']"
    role = "message['role']"
    trimmed = f"{text} | trim" if template.strips else text
    if template.between:  # ChatML
        opening = f"'{words[template.openings['user'][0]]}' + {role} + '\\n'"
        closing = f"'{words[template.end]}\\n'"
        reply = f"'{words[template.openings['user'][0]]}assistant\\n'"
    else:
        opening = f"'<|' + {role} + '|>'"
        closing = f"'{words[template.end]}'"
        reply = f"'{words[template.openings['assistant'][0]]}'"
    steps = [
        _tag("for message in messages"),
        _tag(f"if {role} not in {json.dumps(ROLES)}"),
        _put(f"raise_exception('a role is not one of {', '.join(ROLES)}')"),
        _tag("endif"),
        _tag(f"for marker in {json.dumps(sorted({*markers}))}"),
        _tag(f"if marker in {text}"),
        _put("raise_exception('a message has the special token ' + marker)"),
        _tag("endif"),
        _tag("endfor"),
        _put(f"{opening} + ({trimmed}) + {closing}"),
        _tag("endfor"),
        _tag("if add_generation_prompt"),
        _put(reply),
        _tag("endif"),
    ]
    return "".join(steps)


def _tag(statement: str) -> str:
    return "{" + f"% {statement} %" + "}"


def _put(expression: str) -> str:
    return "{" * 2 + f" {expression} " + "}" * 2


def _named(content: dict[str, Any], markers: dict[str, int]) -> dict[str, Any]:
    """Return tokenizer.json with the bytes that mark messages as special tokens."""
    vocabulary = {place: word for word, place in content["model"]["vocab"].items()}
    vocabulary |= {place: word for word, place in markers.items()}
    form = {**dict.fromkeys(FLAGS, False), "special": True}
    added = [{"id": markers[marker], "content": marker, **form} for marker in OURS]
    # Of several sources of conversations, an earlier one has added them.
    added = [token for token in added if token not in content["added_tokens"]]
    model = {**content["model"], "vocab": {word: place for place, word in vocabulary.items()}}
    return {**content, "model": model, "added_tokens": [*content["added_tokens"], *added]}
