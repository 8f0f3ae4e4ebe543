"""The `plan` command: predict whether a run fits, its speed, and its cost, on any devices.

Nothing is trained and no device is needed: the model is built without content.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep_gpt import PROGRAM
from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.cluster import flags
from lockstep_gpt.extras.cluster.chosen import Chosen, budget
from lockstep_gpt.extras.cluster.hardware import (
    HARDWARE,
    LINKS,
    Hardware,
    find_hardware,
    find_link,
)
from lockstep_gpt.extras.cluster.law import expected
from lockstep_gpt.launch import compose

if TYPE_CHECKING:
    from lockstep_gpt.extras.cluster.prediction import Plan

WORLD_SIZES = tuple(2**power for power in range(11))  # 1 to 1024
HELP = f"""usage: {PROGRAM} plan [flags] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Predict memory, step time, scaling, time, and cost of a run, for several numbers of devices.
It accepts the settings of {PROGRAM} train, and these flags:

  --hardware NAME   {", ".join(HARDWARE)}
                    or a profile that {PROGRAM} doctor --save-profile FILE.json wrote
  --devices LIST    numbers of devices; by default those of 1,2,4,...,1024 that can run it
  --scaling KIND    strong keeps batch.global_size; weak lets it grow with the devices;
                    by default strong if it is set
  --tokens N        tokens of the run; by default max_steps or max_tokens, if the command or an
                    experiment in it sets one, otherwise 20 per parameter
  --price X         price of one device per hour, in any currency
  --utilisation X   fraction of the dense peak FLOP/s that forward and backward reach
  --per-node N      devices per node           --adapters N    network adapters per node
  --intra LINK      link within a node         --inter LINK    between nodes, per adapter
                    LINK: a number of GB/s in one direction, or one of
{indent(fill(", ".join(LINKS), 70), " " * 20)}
  --chart FILE.png  draw the scaling           --json          print everything as JSON

Example: {PROGRAM} plan model=gpt2_xl precision=bf16-mixed --hardware a100-80 --price 2"""


def main(arguments: list[str]) -> int:
    """Print the plan of the configuration in `arguments`."""
    parser = flags.Parser("plan", HELP)
    for name in ("hardware", "scaling", "intra", "inter"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--devices", type=flags.counts)
    for name in ("tokens", "price", "utilisation"):
        parser.add_argument(f"--{name}", type=flags.above_zero)
    for name in ("per-node", "adapters"):
        parser.add_argument(f"--{name}", type=flags.count)
    parser.add_argument("--json", action="store_true")
    options, overrides = parser.split(arguments)
    if options.scaling not in (None, "strong", "weak"):
        raise UserError(f"--scaling {options.scaling} is not one of strong, weak")
    hardware = _hardware(options)

    def job(composed: DictConfig) -> tuple[Config, Chosen]:
        return compose.resolve_config(composed)[1], Chosen.now()

    gc.disable()  # else a third of the time goes into scanning what imports keep for good
    try:
        for config, chosen in flags.each_job(overrides, job):
            _show(_plan(config, chosen, hardware, options), options)
    finally:
        gc.freeze()
        gc.enable()
    return 0


def _plan(config: Config, chosen: Chosen, hardware: Hardware, options: Any) -> Plan:
    from lockstep_gpt.extras.cluster.prediction import predict, vocabulary

    size = chosen.vocabulary()
    whose = f"that of data={config.data.kind}"
    if size:
        whose = (
            f"GPT-2's, because model={chosen.model} is, and no data is chosen; data=... plans "
            f"for yours ({vocabulary(config.data)} with data={config.data.kind})"
        )
    tokens: float | None = options.tokens
    source = ""
    if tokens:
        source = "by --tokens"
    elif chosen.budget and (config.max_steps or config.max_tokens):
        tokens, source = budget(config)
    plan = predict(
        config,
        hardware,
        options.devices or WORLD_SIZES,
        scaling=options.scaling,
        tokens=tokens,
        price=options.price,
        vocab_size=size,
    )
    plan = replace(plan, vocabulary=whose, budget=source)
    if plan.rows and not options.devices:
        plan = _without_refused(plan)
    if options.tokens:
        return plan
    return replace(plan, expected=expected(config))


def _without_refused(plan: Plan) -> Plan:
    """Return a plan with one note for all numbers of devices that nobody has asked for."""
    if not plan.refused:
        return plan
    numbers = ", ".join(map(str, plan.refused))
    note = (
        f"a run can't use {numbers} devices, which are left out; --devices LIST says why, and "
        "--scaling weak lets the batch grow with them"
    )
    return replace(plan, refused={}, notes=[*plan.notes, note])


def _hardware(options: Any) -> Hardware:
    hardware = find_hardware(options.hardware or "h100")
    changes: dict[str, Any] = {
        "utilisation": options.utilisation,
        "devices_per_node": options.per_node,
        "adapters": options.adapters,
        "intra": options.intra and find_link(options.intra, hardware.intra),
        "inter": options.inter and find_link(options.inter, hardware.inter),
    }
    if (options.utilisation or 0) > 1:
        raise UserError(f"--utilisation {options.utilisation:g} must be at most 1, all of the peak")
    return replace(hardware, **{name: value for name, value in changes.items() if value})


def _show(plan: Plan, options: Any) -> None:
    from lockstep_gpt.extras.cluster import chart, table

    if options.json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        print(table.as_text(plan))
    if options.chart:
        chart.draw(plan, options.chart)
