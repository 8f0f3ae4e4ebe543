import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt import extras
from lockstep_gpt.config import (
    GPT_MODULE,
    LEVELS,
    PRECISIONS,
    Config,
    as_values,
    from_container,
    groups,
    settings_on_resume,
    with_defaults,
    without_defaults,
)
from lockstep_gpt.tokens.data_settings import DataModuleConfig, data_choices
from lockstep_gpt.errors import UserError
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.registry import settings_classes
from lockstep_gpt.optim import adamw, muon
from lockstep_gpt.training.optim_settings import DECAYS, OptimConfig
from lockstep_gpt.training.trainer_settings import ACCELERATORS

SOURCES = [*data_choices().values()]
SECTIONS = [Config, DataModuleConfig, *groups().values(), *SOURCES]
VALUES = {
    "max_steps": 10,
    "batch": {"global_size": 4},
    "model": {"block_size": 8, "n_layer": 1, "n_head": 4, "n_embd": 8},
    "data": {"_target_": "lockstep_gpt.tokens.sources.stdlib.StandardLibrary"},
    "optim": {"algorithm": "adamw"},
}


def with_setting(path, value):
    section, _, name = path.rpartition(".")
    if not section:
        return {**VALUES, name: value}
    return {**VALUES, section: {**VALUES.get(section, {}), name: value}}


def numbers_in(section):
    hints = get_type_hints(section)
    named = [f"{section.node}.{item.name}".lstrip(".") for item in dataclasses.fields(section)]
    kinds = [hints[item.name] for item in dataclasses.fields(section)]
    return {name for name, kind in zip(named, kinds, strict=True) if kind in (float, float | None)}


FLOATS = sorted(set().union(*map(numbers_in, SECTIONS)))
SCALINGS = OptimConfig.__dataclass_fields__["lr_scaling"].metadata["choices"]


def test_the_choices_of_settings_have_ours():
    assert {"32-true", "bf16-mixed", "16-mixed", "64-true"} <= {*PRECISIONS}
    assert {"quiet", "normal", "debug"} <= {*LEVELS}
    assert {"linear", "sqrt", "none"} <= {*SCALINGS}
    assert {"cosine", "linear", "constant", "wsd"} <= {*DECAYS}
    assert {"auto", "cpu", "gpu", "cuda", "mps"} <= {*ACCELERATORS}


ADDED = """
from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import ExtraSettings, setting

SETTINGS = {"NAME": ".extras.NAME:Settings"}


@dataclass
class Settings(ExtraSettings):
    node: ClassVar[str] = "NAME"
    size: int = setting("of an extra", 1, at_least=1)
    place: str | None = setting("of an extra", None, on_resume="machine")
"""


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Create extras that add settings, instead of the existing extras."""

    def add(*names):
        folder = tmp_path / "-".join(["extras", *names])  # a folder's contents never change
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text(ADDED.replace("NAME", name))
            monkeypatch.delitem(sys.modules, f"{extras.__name__}.{name}", raising=False)
        monkeypatch.setattr(extras, "__path__", [str(folder)])

    return add


def test_an_extra_adds_a_group_of_settings(added):
    added("one")
    kind = groups()["one"]
    with pytest.raises(UserError, match=r"^one\.size=0 must be at least 1$"):
        from_container(with_setting("one.size", 0))
    config = from_container(with_setting("one.size", 3))
    assert kind.of(config).size == kind.of(dataclasses.replace(config, seed=2)).size == 3
    assert kind.of(from_container(VALUES)) == kind.of(Config(max_steps=1)) == kind()
    assert "one.place" in settings_on_resume("machine")
    assert "one.size" in settings_on_resume("free")
    with pytest.raises(OmegaConfBaseException, match="Key 'two' not in 'Config'"):
        from_container(with_setting("two.size", 3))


def test_an_extra_s_settings_are_frozen_only_if_they_differ_from_the_defaults(added):
    added("one")
    gpt = {"module": {"_target_": GPT_MODULE}}  # as every run of an earlier version
    values = {"seed": 1, "one": {"size": 1, "place": None}, **gpt}
    assert without_defaults(values) == {"seed": 1}
    assert with_defaults({"seed": 1}) == values
    changed = {"seed": 1, "one": {"size": 2, "place": None}, "module": {"_target_": "mine.M"}}
    assert without_defaults(changed) == with_defaults(changed) == changed


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_has_a_description(section):
    hints = get_type_hints(section)
    for item in dataclasses.fields(section):
        hint = hints[item.name]  # of `data`, any class
        group = dataclasses.is_dataclass(hint) or "dict" in str(hint) or hint is Any
        assert group or item.metadata["meaning"], item.name


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_whole_number_has_limits(section):
    hints = get_type_hints(section)
    empty = section.__new__(section)
    for item in dataclasses.fields(section):
        if hints[item.name] not in (int, int | None):
            continue
        for value in (-1, 99_999_999_999_999_999_999):
            setattr(empty, item.name, value)
            with pytest.raises(
                UserError, match=rf"{item.name}={value} must be at (least|most) \d+$"
            ):
                empty._check(item, value)


def test_each_setting_declares_its_treatment_on_resume():
    kept, machine = settings_on_resume("kept"), settings_on_resume("machine")
    assert {"seed", "batch.global_size", "optim.algorithm", "data.fingerprint"} < kept
    assert {"model.n_layer", "model.bias", "data.source.val_fraction", "tokenizer"} < kept
    assert {"launch.max_restarts", "data.root", "data.source.path"} < machine
    free = settings_on_resume("free")
    assert {"max_steps", "optim.lr", "precision", "model.dropout", "val_tokens"} < free
    for source in SOURCES:
        target = f"{source.__module__}.{source.__qualname__}"
        kept, machine, free = (
            settings_on_resume(treatment, target) for treatment in ("kept", "machine", "free")
        )
        assert not kept & machine
        assert not free & (kept | machine)


def test_valid_values_are_kept_unchanged():
    config = from_container(with_setting("optim.lr", 0.5))
    assert (config.max_steps, config.batch.global_size, config.optim.lr) == (10, 4, 0.5)
    assert config.data == data_choices()["stdlib"]()


def test_the_frozen_values_of_a_config_give_the_same_config():
    config = from_container(with_setting("trainer.devices", 2))
    values = dataclasses.asdict(config)
    of_extras = values.pop("of_extras")
    assert from_container({**values, **of_extras}) == config


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("seed=-1", "must be at least 0"),
        ("max_steps=0", "must be at least 1"),
        ("val_every=0", "must be at least 1"),
        ("log_every=-5", "must be at least 1"),
        ("batch.micro_size=0", "must be at least 1"),
        ("batch.global_size=-4", "must be at least 1"),
        ("batch.reference_size=0", "must be at least 1"),
        ("model.block_size=0", "must be at least 1"),
        ("model.n_layer=0", "must be at least 1"),
        ("model.n_head=0", "must be at least 1"),
        ("model.n_embd=-8", "must be at least 1"),
        ("model.dropout=-0.1", "must be at least 0"),
        ("model.dropout=1.0", "must be below 1"),
        ("data.source.val_fraction=0.0", "must be above 0"),
        ("data.source.val_fraction=1.0", "must be below 1"),
        ("val_tokens=0", "must be at least 1"),
        ("optim.lr=0.0", "must be above 0"),
        ("optim.lr=-0.001", "must be above 0"),
        ("schedule.warmup=-1", "must be at least 0"),
        ("schedule.decay_fraction=0.0", "must be above 0"),
        ("schedule.decay_fraction=1.5", "must be at most 1"),
        ("schedule.final_fraction=-0.5", "must be at least 0"),
        ("schedule.final_fraction=1.5", "must be at most 1"),
        ("optim.beta1=1.0", "must be below 1"),
        ("optim.beta2=-0.5", "must be at least 0"),
        ("optim.eps=0.0", "must be above 0"),
        ("optim.weight_decay=-0.5", "must be at least 0"),
        ("clip_norm=0.0", "must be above 0"),
        ("checkpoint.every=0", "must be at least 1"),
        ("checkpoint.keep_last=0", "must be at least 1"),
        ("checkpoint.keep_best=-1", "must be at least 0"),
        ("launch.max_restarts=-1", "must be at least 0"),
        ("launch.grace_seconds=0.0", "must be above 0"),
        ("precision=no_such", f"is not one of {', '.join(PRECISIONS)}"),
        ("verbosity=no_such", f"is not one of {', '.join(LEVELS)}"),
        ("optim=no_such", "is not adamw, muon, or another module of training/"),
        ("model=no_such", "is not gpt, modern, or another module of model/"),
        ("lr_scaling=no_such", f"is not one of {', '.join(SCALINGS)}"),
        ("schedule.decay=no_such", f"is not one of {', '.join(DECAYS)}"),
        ("model.n_embd=9", "is not divisible by model.n_head=4; nearest: model.n_embd=8"),
        ("model.n_embd=3", "is not divisible by model.n_head=4; nearest: model.n_embd=4"),
        (
            "resume=true",
            "is not none, auto, or a path; to continue a run, set run_dir=RUN resume=auto",
        ),
        ("trainer.devices=0", "must be auto or a whole number of at least 1"),
        ("trainer.devices=abc", "must be auto or a whole number of at least 1"),
        ("trainer.devices=true", "must be auto or a whole number of at least 1"),
        ("trainer.devices=1.5", "must be auto or a whole number of at least 1"),
        ("trainer.num_nodes=0", "must be a whole number of at least 1"),
        ("trainer.devices=99999", "must be at most 1024 on one machine"),
        ("trainer.num_nodes=100001", "must be at most 100000"),
        ("max_steps=99999999999999999999", "must be at most 1000000000000000"),
        ("model.n_layer=99999999", "must be at most 10000"),
        ("trainer.num_nodes=auto", "must be a whole number of at least 1"),
        ("trainer.accelerator=no_such", f"is not one of {', '.join(ACCELERATORS)}"),
        ("trainer.sync_batchnorm=1", "must be true or false"),
    ],
)
def test_an_error_is_the_setting_as_typed_and_its_rule_in_one_line(setting, rule):
    path, _, value = setting.partition("=")
    with pytest.raises(UserError) as refusal:
        from_container(with_setting(path, yaml.safe_load(value)))
    assert str(refusal.value) == f"{setting} {rule}"


@pytest.mark.parametrize("path", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_infinity_are_rejected(path, value):
    with pytest.raises(UserError, match=rf"^{re.escape(path)}={value} must be a finite number$"):
        from_container(with_setting(path, float(value)))


def test_a_seed_outside_torch_s_range_is_rejected():
    with pytest.raises(UserError, match=r"^seed=18446744073709551616 must be at most"):
        from_container(with_setting("seed", 2**64))


def test_a_batch_without_a_size_is_rejected():
    with pytest.raises(
        UserError, match=r"^batch\.micro_size=null and batch\.global_size=null leave"
    ):
        from_container(with_setting("batch.global_size", None))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("max_stepz", 3),
        ("optim.learning_rate", 0.1),
        ("max_steps", "many"),
        ("max_steps", None),
        ("max_tokens", 99),
        ("optim.warmup_tokens", 50),
        ("seed", 1.5),
        ("compile", "perhaps"),
        ("batch", 3),
    ],
)
def test_unknown_settings_are_rejected(path, value):
    with pytest.raises(OmegaConfBaseException):
        from_container(with_setting(path, value))


def test_a_reference_to_the_environment_is_resolved_when_the_values_are_read(monkeypatch):
    monkeypatch.setenv("NAME_OF_THE_RUN", "here")
    config = from_container(with_setting("run_name", "${oc.env:NAME_OF_THE_RUN}"))
    assert config.run_name == "here"


def test_a_config_becomes_plain_values_and_back(composed):
    config = composed("experiment=smoke")
    values = as_values(config)
    assert from_container(values) == config
    assert not {"of_extras", *settings_classes()} & {*values}  # they have their defaults


def test_a_config_from_code_is_checked_like_one_from_yaml():
    with pytest.raises(UserError, match=r"^optim\.lr=-1 must be above 0$"):
        OptimConfig(algorithm="adamw", lr=-1)
    with pytest.raises(UserError, match=r"^max_steps=0 must be at least 1$"):
        Config(max_steps=0)


def test_every_setting_is_read_somewhere():
    package = Path(extras.__file__).parents[1]
    files = [path for path in package.rglob("*.py") if path.name != "config.py"]
    sources = "\n".join(path.read_text("utf-8") for path in files)
    owners = {Config, *groups().values(), *data_choices().values()}
    names = {item.name for owner in owners for item in dataclasses.fields(owner)}
    names.remove("of_extras")  # the groups of extras, no setting
    read = {*re.findall(r"\.(\w+)", sources), *re.findall(r"\[?\"(\w+)\"", sources)}
    for made in (GPT, ModernGPT, adamw, muon):  # whose arguments are settings
        read |= {*inspect.signature(made).parameters}
    assert names - read == set()
