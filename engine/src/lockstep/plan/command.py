"""The `plan` command: predict whether a run fits, its speed, and its cost, on any devices.

Nothing is trained and no device is needed: the model is built without content.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lockstep import project
from lockstep.errors import UserError
from lockstep.launch import flags, hydra_job, targets
from lockstep.launch.main import training
from lockstep.plan.hardware import HARDWARE, LINKS, Hardware, find_hardware, find_link

if TYPE_CHECKING:
    from lockstep.plan.prediction import Plan

# Size of GPT-2's vocabulary (Radford et al. 2019, section 2.3), and the presets named after the
# size of their models with it; modern presets are named after the size without a separate head.
GPT2_VOCABULARY = 50_257
OF_GPT2 = {
    *("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"),
    *("modern_124m", "modern_350m", "modern_1b"),
}
OF_DATA = {"data", "tokenizer", "val_tokens"}  # settings of the tokens
WORLD_SIZES = tuple(2**power for power in range(11))  # 1 to 1024
HELP = f"""usage: PROGRAM plan [flags] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Predict memory, step time, scaling, time, and cost of a run, for several numbers of devices.
It accepts the settings of PROGRAM train, and these flags:

  --hardware NAME   {", ".join(HARDWARE)}
                    or a profile that PROGRAM doctor --save-profile FILE.json wrote
  --devices LIST    numbers of devices; by default those of 1,2,4,...,1024 that can run it
  --scaling KIND    strong keeps batch.global_size; weak lets it grow with the devices;
                    by default strong if it is set
  --tokens N        tokens of the run; by default those of max_steps, if the command or an
                    experiment in it sets one, otherwise 20 per parameter
  --price X         price of one device per hour, in any currency
  --utilisation X   fraction of the dense peak FLOP/s that forward and backward reach;
                    {Hardware.utilisation} by default, or as measured in a profile
  --per-node N      devices per node           --adapters N    network adapters per node
  --intra LINK      link within a node         --inter LINK    between nodes, per adapter
                    LINK: a number of GB/s in one direction, or one of
{indent(fill(", ".join(LINKS), 70), " " * 20)}
  --json            print everything as JSON

Example: PROGRAM plan model=gpt2_xl precision=bf16-mixed --hardware a100-80 --price 2"""


def main(arguments: list[str]) -> int:
    """Print the plan of the configuration in `arguments`."""
    parser = flags.Parser("plan", HELP)
    for name in ("hardware", "scaling", "intra", "inter"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--devices", type=flags.counts)
    for name in ("tokens", "price", "utilisation"):
        parser.add_argument(f"--{name}", type=flags.above_zero)
    for name in ("per-node", "adapters"):
        parser.add_argument(f"--{name}", type=flags.count)
    parser.add_argument("--json", action="store_true")
    options, overrides = parser.split(arguments)
    if options.scaling not in (None, "strong", "weak"):
        raise UserError(f"--scaling {options.scaling} is not one of strong, weak")
    project.current().refuse_to_train_nothing()
    hardware = _hardware(options)
    gc.disable()  # else a third of the time goes into scanning what imports keep for good
    try:
        for config, chosen in flags.each_job(training(), overrides, _checked):
            _show(_plan(config, chosen, hardware, options), options)
    finally:
        gc.freeze()
        gc.enable()
    return 0


def _checked(config: DictConfig) -> tuple[DictConfig, Chosen]:
    """Return a configuration that can be planned, and what was chosen for it."""
    targets.refuse_mistakes(hydra_job.values_to_freeze(config), {"*": ("*",)})
    return config, Chosen.now()


def _plan(config: DictConfig, chosen: Chosen, hardware: Hardware, options: Any) -> Plan:
    from lockstep.plan import experiment

    if not experiment.trains_language_model(config):
        raise UserError(
            "plan predicts runs whose model and optim are nodes with a _target_, and whose data "
            "has a block_size; one is missing: call lockstep.plan.predict in Python"
        )
    vocab_size, vocabulary = _vocabulary(config, chosen, experiment.vocabulary)
    samples, budget = _budget(config, chosen, options.tokens)
    plan = experiment.predicted(
        config,
        hardware,
        options.devices or WORLD_SIZES,
        vocab_size=vocab_size,
        samples=samples,
        scaling=options.scaling,
        price=options.price,
    )
    assert plan.tokens is not None
    sources = replace(plan.tokens, vocabulary=vocabulary, budget=budget)
    plan = replace(plan, tokens=sources)
    if plan.rows and not options.devices:
        plan = _without_refused(plan)
    return plan


def _vocabulary(
    config: DictConfig, chosen: Chosen, of_data: Callable[[DictConfig], int]
) -> tuple[int, str]:
    """Return the number of token ids, and whose they are."""
    size = of_data(config.data)
    if not chosen.implies_gpt2:
        return size, f"that of data={chosen.source}"
    line = f"GPT-2's, because model={chosen.model} is, and no data is chosen; "
    return GPT2_VOCABULARY, f"{line}data=... plans for yours ({size} with data={chosen.source})"


def _budget(config: DictConfig, chosen: Chosen, tokens: float | None) -> tuple[float | None, str]:
    """Return the samples of the run, and where they come from; None: nothing says."""
    per_sample = config.data.block_size
    if tokens:
        return tokens / per_sample, "by --tokens"
    if not chosen.budget:
        return None, ""
    size = config.batch.global_size or config.batch.micro_size or 1
    whose = "" if config.batch.global_size else ", on one device"
    line = f"max_steps={config.max_steps} of {size * per_sample:,} tokens{whose}"
    return config.max_steps * size, line


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


@dataclass(frozen=True)
class Chosen:
    """The choices of the command line, or of the experiment that it names."""

    model: str  # the choice in effect
    source: str  # the choice of `data` in effect
    data: bool  # whether something says which tokens
    budget: bool

    @classmethod
    def now(cls) -> Chosen:
        """Read the choices from Hydra; call this inside a Hydra job."""
        hydra = HydraConfig.get()
        choices = hydra.runtime.choices
        names = {word.lstrip("+~").partition("=")[0] for word in hydra_job.overrides()}
        if "experiment" in names:
            folders = [Path(source.path) for source in hydra.runtime.config_sources]
            names.update(_names_in(str(choices.get("experiment")), folders))
        groups = {name.partition(".")[0] for name in names}
        says_tokens = bool(groups & OF_DATA)
        model, source = str(choices.get("model")), str(choices.get("data"))
        return cls(model, source, says_tokens, "max_steps" in names)

    @property
    def implies_gpt2(self) -> bool:
        """Whether the preset implies GPT-2's vocabulary, because nothing says which tokens."""
        return self.model in OF_GPT2 and not self.data


def _names_in(experiment: str, folders: list[Path]) -> Iterator[str]:
    """Yield the settings and groups that an experiment sets, and those of its base experiments."""
    for folder in folders:
        path = folder / "experiment" / f"{experiment}.yaml"
        if not path.is_file():
            continue
        content = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(content, dict)
        yield from map(str, content)
        for entry in content.get("defaults", []):
            if isinstance(entry, dict):
                yield from (name.split()[-1].lstrip("/").partition("@")[0] for name in entry)
            elif entry != "_self_":
                yield from _names_in(entry, folders)


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
    from lockstep.plan import table

    if options.json:
        print(json.dumps(_as_json(plan), indent=2))
    else:
        print(table.as_text(plan))


def _as_json(plan: Plan) -> dict[str, Any]:
    values = asdict(plan)
    names = ("micro_size", "accumulation", "global_size", "devices", "nodes", "tensor_parallel")
    for row, values_of_row in zip(plan.rows, values["rows"], strict=True):
        values_of_row["batch"] = {name: getattr(row.batch, name) for name in names}
    return values
