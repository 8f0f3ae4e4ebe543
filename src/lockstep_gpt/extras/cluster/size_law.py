"""Fit how the loss falls with the size of a model, on your own data.

usage: lockstep-gpt size_law [--sizes 0.1M,0.18M,0.32M,0.56M,1M] [overrides]
       lockstep-gpt size_law --check 2M [overrides]
       lockstep-gpt size_law --rates [overrides]
       with --json size_law.json and --plot size_law.svg for what is written

Every run is the real command, `train model=auto size.weights=SIZE`; overrides apply to all, such as
`data=text data.path=FILE`. `--check` writes down what an earlier fit expects of a size, then trains
it. `--rates` sweeps the learning rate at three widths: the best should be the same at all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep_gpt import PROGRAM
from lockstep_gpt.data.prepare import opened
from lockstep_gpt.data.shards import load_index
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.extras.cluster.law import Law, fitted, left_out
from lockstep_gpt.extras.cluster.plot import as_svg
from lockstep_gpt.extras.cluster.rules import parsed, shape, weights
from lockstep_gpt.extras.cluster.size_settings import SizeSettings
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.whole_files import write_output

SIZES = "0.1M,0.18M,0.32M,0.56M,1M"
CLOSE = 0.03  # acceptable error of a prediction, as a fraction of the loss
PASSES = 2  # over the text; beyond these, the same tokens teach less
QUIET = ["logger=none", "val_every=1000000", "checkpoint.every=null", "callbacks.sample=null"]
# Three widths and depths, each trained on the same few tokens.
WIDTHS, RATES = "0.1M,0.33M,0.8M", (0.0075, 0.015, 0.03, 0.06, 0.12)
SHORT = ["max_steps=150", "batch.global_size=16", "batch.reference_size=16"]
SHORT += ["optim.warmup_steps=3", "optim.weight_decay=0"]


def main(arguments: list[str]) -> int:
    """Run one of the three modes, and print the result."""
    options, overrides = _options(arguments)
    if options.rates:
        print(rates(overrides))
    elif options.check:
        check(options, overrides)
    else:
        fit(options, overrides)
    return 0


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} size_law",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", default=SIZES, help="from small to large")
    parser.add_argument("--json", type=Path, default=Path("size_law.json"))
    parser.add_argument("--plot", type=Path, default=Path("size_law.svg"))
    parser.add_argument(
        "--check", metavar="SIZE", help="predict its loss by the file, then train it"
    )
    parser.add_argument("--rates", action="store_true", help="sweep the learning rate instead")
    return parser.parse_known_args(arguments)


def fit(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train all sizes; print and write their law, which is valid if it could be tested."""
    runs = trained([f"size.weights={options.sizes}", *overrides])
    counts = [run["weights"] for run in runs]
    losses = [run["val_loss"] for run in runs]
    law = fitted(counts, losses)
    tested = left_out(counts, losses)
    faults = []
    if abs(tested - losses[-1]) > CLOSE * losses[-1]:
        faults.append(f"the law of the smaller sizes misses the largest by more than {CLOSE:.0%}")
    if max(run["passes"] for run in runs) > PASSES:
        faults.append(f"the largest repeats the text more than {PASSES} times; use more text")
    values = {"source": runs[0]["source"], **asdict(law), "is_valid": not faults}
    _write(options, {**values, "runs": runs, "checked": []})
    print(table(runs, law, tested))
    if faults:
        raise RunError(f"no valid fit: {'; '.join(faults)}")


def check(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print the loss that the law predicts for a size, then train it and print its loss."""
    try:
        content = json.loads(options.json.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{options.json} does not exist; write it by this command without --check"
        ) from None
    law = law_of(content)
    dimensions = shape(parsed(options.check))
    expected = law.loss(weights(dimensions["n_layer"], dimensions["n_embd"]))
    print(f"{options.check} is expected to end at {expected:.4f}", flush=True)
    (run,) = trained([f"size.weights={options.check}", *overrides])
    content["checked"].append({**run, "expected": expected})
    _write(options, content)
    print(f"it ends at {run['val_loss']:.4f}: {expected / run['val_loss'] - 1:+.1%} off")


def law_of(content: dict[str, Any]) -> Law:
    """Return the law in a file."""
    return Law(content["floor"], content["factor"], content["exponent"])


def _write(options: argparse.Namespace, content: dict[str, Any]) -> None:
    write_output(options.json, json.dumps(content, indent=1) + "\n")
    picture = as_svg(law_of(content), content["runs"], content["checked"])
    write_output(options.plot, picture)


def trained(words: list[str]) -> list[dict[str, Any]]:
    """Train a sweep with one command; return the results of its runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep_gpt", "train", "--multirun"]
        words = ["model=auto", *words, *QUIET, f"run_dir={folder}/runs"]
        if subprocess.run([*command, *words], check=False).returncode:
            raise RunError("training failed; its own message is above")
        runs = [path.parent for path in Path(folder, "runs").glob("*/summary.json")]
        return [_read(RunDirectory(run)) for run in sorted(runs, key=lambda run: int(run.name))]


def _read(run: RunDirectory) -> dict[str, Any]:
    config = run.load()
    summary = run.read_summary()
    model = config.model
    text = load_index(opened(config.data)).splits["train"].tokens
    return {
        "size": SizeSettings.of(config).weights,
        "weights": weights(model.n_layer, model.n_embd),
        "width": model.n_embd,
        "source": config.data.kind,
        "lr": config.optim.lr,
        "seed": config.seed,
        "steps": summary["step"],
        "tokens": summary["tokens"],
        "passes": round(summary["tokens"] / text, 3),
        "seconds": round(summary["tokens"] / summary["tokens_per_second"], 1),
        "val_loss": summary["val_loss"],
    }


def table(runs: list[dict[str, Any]], law: Law, tested: float) -> str:
    """Return each run with the law's prediction, then the law and how it was tested."""
    head = f"{'size':>6} {'weights':>9} {'width':>5} {'steps':>6} {'tokens':>9} {'passes':>6}"
    lines = [f"{head} {'seconds':>7} {'loss':>7} {'law':>7} {'off':>6}"]
    for run in runs:
        predicted = law.loss(run["weights"])
        lines.append(
            f"{run['size']:>6} {run['weights']:9,} {run['width']:5} {run['steps']:6,} "
            f"{run['tokens']:9,} {run['passes']:6.2f} {run['seconds']:7.0f} "
            f"{run['val_loss']:7.4f} {predicted:7.4f} {predicted / run['val_loss'] - 1:+6.1%}"
        )
    off = tested / runs[-1]["val_loss"] - 1
    return "\n".join(
        [
            *lines,
            f"\nloss = {law.floor:.4f} + {law.factor:.4g} x weights ^ -{law.exponent:.3f}",
            f"fitted without {runs[-1]['size']}, the law predicts {tested:.4f}: {off:+.1%} off",
        ]
    )


def rates(overrides: list[str]) -> str:
    """Return the losses of three widths at several learning rates, with equal steps and batches."""
    swept = f"optim.lr={','.join(map(str, RATES))}"
    runs = trained([f"size.weights={WIDTHS}", swept, *SHORT, *overrides])
    lines = ["width" + "".join(f"{rate:9g}" for rate in RATES) + "     best"]
    for width in dict.fromkeys(run["width"] for run in runs):
        losses = {run["lr"]: run["val_loss"] for run in runs if run["width"] == width}
        best = min(losses, key=lambda rate: losses[rate])
        lines.append(
            f"{width:5}" + "".join(f"{losses[rate]:9.4f}" for rate in RATES) + f"{best:9g}"
        )
    return "\n".join(lines)
