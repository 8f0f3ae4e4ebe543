"""What earlier versions froze, as this version reads it. Add a line when a setting changes."""

from __future__ import annotations

from typing import Any

# `data.source` until 0.1.0 -> the class that `data._target_` names since.
SOURCES = {
    "stdlib": "lockstep_gpt.data.sources.stdlib.StandardLibrary",
    "text": "lockstep_gpt.data.sources.text.Text",
    "jsonl": "lockstep_gpt.data.sources.jsonl.JsonLines",
    "parquet": "lockstep_gpt.data.sources.parquet.ParquetFiles",
    "huggingface": "lockstep_gpt.data.sources.huggingface.HuggingFaceRows",
    "shards": "lockstep_gpt.data.sources.token_files.TokenFiles",
    "synthetic": "lockstep_gpt.data.sources.synthetic.RandomTokens",
    "mixture": "lockstep_gpt.extras.datasets.mixture.Mixture",
    "chat": "lockstep_gpt.extras.chat.conversations.Conversations",
}
# `data.packing` until 0.1.0 -> the class that `packing._target_` names since.
PACKINGS = {
    "stream": "lockstep_gpt.data.packing.Stream",
    "documents": "lockstep_gpt.extras.datasets.packing.WholeDocuments",
}


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """Return a frozen configuration of an earlier version as this version would have frozen it."""
    data = values.get("data")
    if not isinstance(data, dict) or "source" not in data:
        return values
    migrated = {**values, "data": _with_target(data)}
    if "packing" in data:
        migrated["packing"] = {"_target_": PACKINGS.get(data["packing"], data["packing"])}
    return migrated


def _with_target(data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a source, which named itself by `source`, with its class."""
    # Loader processes gave the same batches in the same order.
    gone = ("source", "packing", "num_workers")
    kept = {name: value for name, value in data.items() if name not in gone}
    if isinstance(kept.get("sources"), dict):
        kept["sources"] = {name: _with_target(own) for name, own in kept["sources"].items()}
    source = data["source"]
    return {"_target_": SOURCES.get(source, source), **kept}
