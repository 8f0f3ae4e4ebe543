"""Rejects arguments that Lightning's Trainer doesn't have."""

import ast
from importlib.util import find_spec
from pathlib import Path

from lockstep_gpt.config import Config
from lockstep_gpt.launch.choices import did_you_mean
from lockstep_gpt.settings import check

OURS = {"_target_", "accelerator", "devices", "num_nodes", "sync_batchnorm"}  # in configs/trainer/


def refuse_unknown(config: Config) -> None:
    """Raise a `UserError` for an argument that Lightning's Trainer lacks, without importing it."""
    trainer = config.trainer
    added = sorted(trainer.keys() - OURS)
    is_lightnings = trainer.get("_target_") == "lightning.pytorch.Trainer"
    if not added or not is_lightnings:
        return
    package = find_spec("lightning")
    if package is None or not package.origin:
        return
    code = ast.parse((Path(package.origin).parent / "pytorch/trainer/trainer.py").read_bytes())
    functions = [node for node in ast.walk(code) if isinstance(node, ast.FunctionDef)]
    constructor = next(function for function in functions if function.name == "__init__")
    known = [argument.arg for argument in constructor.args.kwonlyargs]
    for name in added:
        hint = did_you_mean(name, known, "trainer.")
        rule = f"is not an argument of Lightning's Trainer{hint}"
        check(f"trainer.{name}", trainer[name], name in known, rule)
