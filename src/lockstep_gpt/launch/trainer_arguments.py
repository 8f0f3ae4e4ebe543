"""Rejects arguments that Lightning's Trainer doesn't have."""

import ast
from importlib.util import find_spec
from pathlib import Path

from lockstep_gpt.config import Config
from lockstep_gpt.launch.choices import suggestion
from lockstep_gpt.settings import check

OURS = {"_target_", "accelerator", "devices", "num_nodes", "sync_batchnorm"}  # in configs/trainer/


def refuse_unknown(config: Config) -> None:
    """Raise a `UserError` for an argument that Lightning's Trainer lacks, without importing it."""
    trainer, package = config.trainer, find_spec("lightning")
    added = sorted(trainer.keys() - OURS)
    stock = trainer.get("_target_") == "lightning.pytorch.Trainer"
    if not added or not stock or not package or not package.origin:
        return
    code = ast.parse((Path(package.origin).parent / "pytorch/trainer/trainer.py").read_bytes())
    functions = (each for each in ast.walk(code) if isinstance(each, ast.FunctionDef))
    made = next(each for each in functions if each.name == "__init__")
    known = [argument.arg for argument in made.args.kwonlyargs]
    for name in added:
        hint = suggestion(name, known, "trainer.") or "; remove it"
        rule = f"is not an argument of Lightning's Trainer{hint}"
        check(f"trainer.{name}", trainer[name], name in known, rule)
