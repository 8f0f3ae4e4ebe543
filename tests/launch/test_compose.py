import itertools
import math

import pytest
import yaml
from omegaconf import OmegaConf

from lockstep_gpt import extras
from lockstep_gpt.catalog import how_to_add
from lockstep_gpt.config import from_container
from lockstep_gpt.config_files import config_folder, yaml_files
from lockstep_gpt.tokens import data_settings
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import compose
from lockstep_gpt.launch.checks import SHARDABLE
from lockstep_gpt.run.directory import flat
from lockstep_gpt.training.building import schedule_of

SECRET = "canary-2f6c"
CHOICES = data_settings.data_choices()
WITH_PATH = sorted(name for name, settings in CHOICES.items() if hasattr(settings, "path"))
GROUPS = ("model", "data", "optim", "trainer", "strategy", "callbacks", "logger")


def jobs(*arguments):
    """The result of `checked` for each job: `(values, config)` or the error."""
    ends = []

    def job(config):
        try:
            ends.append(compose.resolve_config(config))
        except UserError as error:
            ends.append(error)

    compose.run(list(arguments), job)
    return ends


def composed(*arguments):
    (end,) = jobs(*arguments)
    if isinstance(end, UserError):
        raise end
    return end


def refusal(*arguments):
    with pytest.raises(UserError) as error:
        composed(*arguments)
    line = str(error.value)
    assert "\n" not in line
    return line


def choices(group):
    return sorted(yaml_files(group))


def complete(group):
    """Return the choices that need no other settings; tests of their extras compose the others."""
    texts = {name: path.read_text() for name, path in yaml_files(group).items()}
    needs = ("${initial:", "/data/mixture", "${oc.env:")
    return [name for name, text in texts.items() if not any(word in text for word in needs)]


def every_choice():
    """Command lines that together use every choice of every group."""
    groups = {group: itertools.cycle(complete(group)) for group in GROUPS}
    lines = [
        [f"{group}={next(names)}" for group, names in groups.items()]
        for _ in range(max(len(complete(group)) for group in GROUPS))
    ]
    for line in lines:
        if "strategy=fsdp2" in line:  # it rejects an optimizer of your own
            allowed = [f"optim={name}" for name in SHARDABLE]
            line[:] = [
                "optim=adamw" if word.startswith("optim=") and word not in allowed else word
                for word in line
            ]
    return lines


@pytest.mark.parametrize("arguments", every_choice(), ids=" ".join)
def test_every_choice_of_every_group_composes(arguments):
    values, config = composed(*arguments)
    taken = dict(argument.split("=") for argument in arguments)
    # A choice with another name, such as one of yours, may have any class.
    assert CHOICES.get(taken["data"], type(config.data)) is type(config.data)
    assert from_container(values) == config


@pytest.mark.parametrize("name", complete("experiment"))
def test_every_experiment_composes_to_the_settings_in_its_file(name):
    values, config = composed(f"experiment={name}")
    file = OmegaConf.load(yaml_files("experiment")[name])
    settings = OmegaConf.to_container(file)
    settings = {key: settings[key] for key in settings if key not in ("defaults", "hydra")}
    plain = {path: value for path, value in flat(settings) if "${" not in str(value)}
    everything = dict(flat(values))
    assert {path: everything[path] for path in plain} == plain
    assert config.max_steps


def test_the_classic_recipe_is_nanogpts_step_for_step():
    _, config = composed("experiment=gpt2_classic")
    schedule = schedule_of(config, config.batch.build().spread_over(1))

    def rate(step):  # of train.py there: 100 steps of warmup, then a cosine from 1e-3 to 1e-4
        if step < 100:
            return 1e-3 * (step + 1) / 101
        return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / 1900)) * 9e-4

    ours, theirs = ([*map(function, range(2000))] for function in (schedule.lr, rate))
    assert ours == pytest.approx(theirs, rel=2e-3)  # it would come down one step later
    shape, optim = config.model, config.optim
    assert (shape.architecture, shape.bias, shape.dropout) == ("gpt", False, 0.0)
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.block_size) == (4, 4, 128, 64)
    assert (optim.algorithm, optim.beta1, optim.beta2, optim.eps) == ("adamw", 0.9, 0.99, 1e-8)
    assert (optim.weight_decay, clip_norm) == (0.1, 1.0)
    assert (config.batch.global_size, config.max_steps, config.precision) == (12, 2000, "32-true")


def test_an_experiment_overrides_groups_and_the_command_line_beats_it():
    _, config = composed("experiment=gpt2_124m", "trainer=cpu", "max_steps=7", "optim.lr=0.5")
    assert (config.model.n_embd, config.precision) == (768, "bf16-mixed")
    assert (config.trainer["accelerator"], config.max_steps, config.optim.lr) == ("cpu", 7, 0.5)


@pytest.mark.parametrize("argument", ["documents.mask=true"])
def test_a_setting_of_a_missing_extra_is_rejected(argument, monkeypatch):
    monkeypatch.setattr(extras, "__path__", [])
    assert refusal(argument) == f"{argument} needs {how_to_add('datasets')}"


def test_a_file_that_the_project_s_would_replace_is_refused(tmp_path):
    (tmp_path / "experiment").mkdir()
    own = config_folder() / "experiment/smoke.yaml"
    file = tmp_path / "experiment/smoke.yaml"
    file.write_bytes(own.read_bytes())
    words = ("experiment=smoke", "--config-dir", str(tmp_path))
    assert composed(*words)[1].max_steps == 20
    file.write_text("# @package _global_\nmax_steps: 3\n")
    line = f"{file} has the name of {own}, which Hydra would read instead; rename it"
    assert refusal(*words) == line


def test_a_user_s_own_experiment_is_found_through_config_dir(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "of_this_test.yaml").write_text(
        "# @package _global_\ndefaults:\n  - smoke\nseed: 5\n"
    )
    _, config = composed("experiment=of_this_test", "--config-dir", str(tmp_path))
    assert (config.seed, config.max_steps) == (5, 20)


def test_environment_variables_stay_references(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", SECRET)
    values, config = composed(
        "run_name=${oc.env:SECRET_KEY}",
        "+logger.a._target_=builtins.dict",  # takes any argument
        "+logger.a.second=${run_name}",
        "+logger.a.inside='key ${oc.env:SECRET_KEY}'",
        "+logger.a.list=[1,'${oc.env:SECRET_KEY}']",
        "+logger.b=${logger.a}",
        "+logger.a.decoded='${oc.decode:${oc.env:SECRET_KEY}}'",
        "+logger.a.seed=${seed}",
    )
    assert SECRET not in yaml.safe_dump(values)
    assert (values["run_name"], values["logger"]["a"]["seed"]) == ("${oc.env:SECRET_KEY}", 1337)
    assert config.run_name == config.logger["a"]["second"] == SECRET
    assert config.logger["a"]["inside"] == f"key {SECRET}"
    assert config.logger["b"]["list"] == [1, SECRET]


def test_other_references_are_resolved_when_the_run_is_frozen():
    values, _ = composed(
        "run_name=run-${seed}-${now:%Y}", "+trainer.min_steps=${schedule.warmup}", "seed=4"
    )
    assert values["run_name"].startswith("run-4-20")
    assert values["trainer"]["min_steps"] == 15


def test_the_command_line_alone_can_describe_a_run():
    _, config = composed("~experiment", "max_steps=3", "batch.global_size=2")
    assert (config.max_steps, config.batch.global_size) == (3, 2)
    assert refusal("~experiment", "max_steps=3").startswith("batch.micro_size=null and batch.")


def test_each_job_of_a_sweep_is_composed_by_itself(tmp_path):
    ends = jobs("--multirun", f"run_dir={tmp_path}", "max_steps=5,0", "seed=1")
    assert ends[0][1].max_steps == 5
    assert str(ends[1]) == "max_steps=0 must be at least 1"


def test_an_error_of_the_job_itself_is_not_taken_for_a_wrong_setting():
    def job(config):
        raise ValueError(f"a fault at step {config.max_steps}")

    with pytest.raises(ValueError, match="a fault at step 3") as fault:
        compose.run(["max_steps=3"], job)
    assert not isinstance(fault.value, UserError)


def test_words_are_understood_by_one_extra_after_the_other(tmp_path, monkeypatch):
    for name, line in (
        ("first", "[*words, 'seed=1']"),
        ("second", "[*words[:-1], words[-1] + '2']"),
    ):
        (tmp_path / f"words_{name}").mkdir()
        target = f'ARGUMENTS = ".extras.words_{name}:understood"'
        code = f"{target}\n\n\ndef understood(words):\n    return {line}\n"
        (tmp_path / f"words_{name}/__init__.py").write_text(code)
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    assert composed("max_steps=900")[0]["seed"] == 12
