"""What the command line chose, and what its preset implies for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep_gpt.config import Config
from lockstep_gpt.launch import compose

# Size of GPT-2's vocabulary (Radford et al. 2019, section 2.3), and the presets named after the
# size of their models with it; modern presets are named after the size without a separate head.
GPT2_VOCABULARY = 50_257
OF_GPT2 = {
    *("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"),
    *("modern_124m", "modern_350m", "modern_1b"),
}
BUDGETS = ("max_steps", "max_tokens")


@dataclass(frozen=True)
class Chosen:
    """The choices of the command line, or of the experiment that it names."""

    model: str  # the choice in effect
    data: bool
    budget: bool

    @classmethod
    def now(cls) -> Chosen:
        """Read the choices from Hydra; call this inside a Hydra job."""
        hydra = HydraConfig.get()
        choices = hydra.runtime.choices
        names = {word.lstrip("+~").partition("=")[0] for word in compose.overrides()}
        if "experiment" in names:
            folders = [Path(source.path) for source in hydra.runtime.config_sources]
            names.update(_names_in(str(choices.get("experiment")), folders))
        groups = {name.partition(".")[0] for name in names}
        return cls(str(choices.get("model")), "data" in groups, not names.isdisjoint(BUDGETS))

    def vocabulary(self) -> int | None:
        """Return the vocabulary size that the preset implies; None if the data determine it."""
        return GPT2_VOCABULARY if self.model in OF_GPT2 and not self.data else None


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


def budget(config: Config) -> tuple[float, str]:
    """Return the number of tokens of the run, and where it comes from."""
    if config.max_tokens is not None:
        return config.max_tokens, f"max_tokens={config.max_tokens}"
    samples = config.batch.global_size or config.batch.micro_size or 1
    whose = "" if config.batch.global_size else ", on one device"
    assert config.max_steps is not None
    tokens = config.max_steps * samples * config.model.block_size
    line = f"max_steps={config.max_steps} of {samples * config.model.block_size:,} tokens{whose}"
    return tokens, line
