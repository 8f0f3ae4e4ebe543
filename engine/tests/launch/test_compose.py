"""What the project's configuration composes to."""

import itertools
import math

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from lockstep_gpt import CONFIGS
from omegaconf import OmegaConf

from lockstep.building import build
from lockstep.errors import UserError
from lockstep.launch import composed, hydra_job, targets
from lockstep.launch.main import training
from lockstep.run.directory import flat

SECRET = "canary-2f6c"
GROUPS = ("model", "data", "optim", "trainer", "strategy", "callbacks", "logger")
# Bases of other choices, which leave something open, and choices that need values from the user.
OPEN = {"model": ("gpt", "modern"), "data": ("tokens", "mixture")}


def jobs(*words):
    """Return the frozen values of each job."""
    made = []

    def job(config):
        made.append(hydra_job.values_to_freeze(config))

    composed.call(training().source, composed.for_hydra(list(words)), job)
    return made


def values_of(*words):
    """Return the frozen values of a command, and the same with all references resolved."""
    (values,) = jobs(*words)
    config = OmegaConf.create(values)
    return values, config


def refusal(*words):
    with pytest.raises(UserError) as error:
        jobs(*words)
    line = str(error.value)
    assert "\n" not in line
    return line


def files_of(group):
    """Return the files of a group, the project's and the engine's, by choice."""
    folders = composed.folders_of(training().source)
    return {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}


def choices(group):
    return sorted(files_of(group))


def complete(group):
    """Return the choices that need no other settings."""
    needs = ("${initial:", "${oc.env:")
    texts = {name: path.read_text() for name, path in files_of(group).items()}
    known = [name for name, text in texts.items() if not any(word in text for word in needs)]
    return [name for name in known if name not in OPEN.get(group, ())]


def every_choice():
    """Command lines that together use every choice of every group."""
    groups = {group: itertools.cycle(complete(group)) for group in GROUPS}
    count = max(len(complete(group)) for group in GROUPS)
    return [[f"{group}={next(names)}" for group, names in groups.items()] for _ in range(count)]


@pytest.mark.parametrize("words", every_choice(), ids=" ".join)
def test_every_choice_of_every_group_has_only_arguments_of_its_class(words):
    values, _ = values_of(*words)
    targets.refuse_mistakes(values, {"*": ("*",)})
    with pytest.raises(UserError, match="has no argument zzz"):
        targets.refuse_mistakes({**values, "batch": {**values["batch"], "zzz": 1}}, {"*": ("*",)})


@pytest.mark.parametrize("name", complete("experiment"))
def test_every_experiment_composes_to_the_settings_in_its_file(name):
    values, config = values_of(f"experiment={name}")
    file = OmegaConf.load(CONFIGS / f"experiment/{name}.yaml")
    settings = OmegaConf.to_container(file)
    settings = {key: settings[key] for key in settings if key not in ("defaults", "hydra")}
    plain = {path: value for path, value in flat(settings) if "${" not in str(value)}
    everything = dict(flat(values))
    assert {path: everything[path] for path in plain} == plain
    assert config.max_steps


def test_the_classic_recipe_is_nanogpts_step_for_step():
    _, config = values_of("experiment=gpt2_classic")
    schedule = build(config.schedule, steps=config.max_steps, peak=config.optim.lr)

    def rate(step):  # of train.py there: 100 steps of warmup, then a cosine from 1e-3 to 1e-4
        if step < 100:
            return 1e-3 * (step + 1) / 101
        return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / 1900)) * 9e-4

    ours, theirs = ([*map(function, range(2000))] for function in (schedule.lr, rate))
    assert ours == pytest.approx(theirs, rel=2e-3)  # it would come down one step later
    shape, optim = config.model, config.optim
    assert shape._target_ == "lockstep_gpt.gpt.GPT"
    assert (shape.bias, shape.dropout) == (False, 0.0)
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.block_size) == (4, 4, 128, 64)
    assert optim._target_ == "lockstep_gpt.optim.adamw"
    assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.99, 1e-8)
    assert (optim.weight_decay, config.clip_norm) == (0.1, 1.0)
    assert (config.batch.global_size, config.max_steps, config.precision) == (12, 2000, "32-true")
    assert config.batch.reference_size == 12  # so the rate isn't scaled


def test_an_experiment_overrides_groups_and_the_command_line_beats_it():
    _, config = values_of("experiment=gpt2_124m", "trainer=cpu", "max_steps=7", "optim.lr=0.5")
    assert (config.model.n_embd, config.precision) == (768, "bf16-mixed")
    assert (config.trainer.accelerator, config.max_steps, config.optim.lr) == ("cpu", 7, 0.5)


def test_a_choice_of_an_optimizer_brings_its_schedule_and_its_clipping():
    _, config = values_of("experiment=smoke", "optim=muon", "schedule.decay_fraction=0.5")
    assert (config.schedule.decay, config.schedule.decay_fraction) == ("wsd", 0.5)
    assert (config.clip_norm, config.optim.head_lr_fraction) == (None, 0.2)


def test_a_user_s_own_experiment_is_found_through_config_dir(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "of_this_test.yaml").write_text(
        "# @package _global_\ndefaults:\n  - smoke\nseed: 5\n"
    )
    _, config = values_of("experiment=of_this_test", "--config-dir", str(tmp_path))
    assert (config.seed, config.max_steps) == (5, 20)


def test_environment_variables_stay_references(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", SECRET)
    values, config = values_of(
        "run_name=${oc.env:SECRET_KEY}",
        "+logger.a._target_=builtins.dict",  # takes any argument
        "+logger.a.second=${run_name}",
        "+logger.a.inside='key ${oc.env:SECRET_KEY}'",
        "+logger.a.list=[1,'${oc.env:SECRET_KEY}']",
        "+logger.a.decoded='${oc.decode:${oc.env:SECRET_KEY}}'",
        "+logger.a.seed=${seed}",
    )
    assert SECRET not in yaml.safe_dump(values)
    assert values["run_name"] == "${oc.env:SECRET_KEY}"
    assert config.run_name == config.logger.a.second == SECRET
    assert (config.logger.a.inside, config.logger.a.seed) == (f"key {SECRET}", 1337)
    assert config.logger.a.list == [1, SECRET]


def test_what_depends_on_the_time_is_decided_once():
    values, config = values_of("run_name=run-${seed}-${now:%Y}", "seed=4")
    assert values["run_name"] == config.run_name
    assert config.run_name.startswith("run-4-20")


def test_the_command_line_alone_can_describe_a_run():
    _, config = values_of("~experiment", "max_steps=3", "batch.global_size=2")
    assert (config.max_steps, config.batch.global_size) == (3, 2)


def test_a_hydra_that_warns_of_version_base_gets_it_only_if_it_means_something(monkeypatch):
    monkeypatch.setattr("hydra.__version__", "1.3.7")
    assert composed.as_argument("1.3") == {"version_base": "1.3"}
    monkeypatch.setattr("hydra.__version__", "1.4.0")
    assert composed.as_argument("1.3") == composed.as_argument(None) == {}
    assert composed.as_argument("1.1") == {"version_base": "1.1"}  # Hydra says that it is gone


def test_each_job_of_a_sweep_is_composed_by_itself(tmp_path):
    made = jobs("--multirun", f"run_dir={tmp_path}", "max_steps=5,7", "seed=1")
    assert [values["max_steps"] for values in made] == [5, 7]


def test_an_argument_that_no_yaml_file_lists_needs_no_plus():
    _, config = values_of("trainer.limit_val_batches=2", "callbacks.progress.line_seconds=3")
    assert (config.trainer.limit_val_batches, config.callbacks.progress.line_seconds) == (2, 3)
    assert refusal("trainer.zzz=2").startswith("unknown setting trainer.zzz; ")


def test_an_error_of_the_job_itself_is_not_taken_for_a_wrong_setting():
    def job(config):
        raise ValueError(f"a fault at step {config.max_steps}")

    with pytest.raises(ValueError, match="a fault at step 3") as fault:
        composed.call(training().source, ["max_steps=3"], job)
    assert not isinstance(fault.value, UserError)


def parsed(word):
    return OverridesParser.create().parse_override(word).value()


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="$")))
def test_a_text_that_hydra_cannot_read_is_quoted(value):
    odd = f"=#{value}"  # begins with what has no meaning in Hydra's grammar
    assert parsed(composed.quoted(f"run_name={odd}")) == odd


@pytest.mark.parametrize("name", ["größe", "a#b", "it's", 'a"b', "step=5.ckpt", "a=b/step=5.ckpt"])
@pytest.mark.parametrize("setting", ["run_dir", "resume", "data.source.path"])
def test_a_path_needs_no_quotes_for_hydra(name, setting):
    assert parsed(composed.quoted(f"{setting}={name}")) == name


@pytest.mark.parametrize("name", ["1e3", "12e4567", "1.10", "1_000", "007", "7", "-3", ".5"])
@pytest.mark.parametrize("setting", ["run_name", "run_dir"])
def test_a_name_that_looks_like_a_number_is_not_rounded(name, setting):
    assert parsed(composed.quoted(f"{setting}={name}")) == name


@pytest.mark.parametrize(
    "word",
    [
        *("run_name=null", "run_name=a-1", "run_name=1,2", "optim.lr=1e-3", "run_dir=runs/1"),
        *("run_dir=a,b", "run_dir='a=b'", "run_dir=${run_name}/1", "seed=1"),
    ],
)
def test_other_words_keep_hydra_s_meaning(word):
    assert composed.quoted(word) == word


def test_a_run_can_have_any_name_of_a_folder(command):
    name = "größe [1] #{it's}"
    command.train(f"run_dir={name}", "max_steps=2", "schedule.warmup=0")
    assert command.summary(name)["status"] == "done"
    assert "is done" in command("train", f"run_dir={name}", "resume=auto").stdout


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=1e-3\r", r"'optim.lr=1e-3\r' ends with a carriage return, as lines of Windows"),
        ("experiment=smoke\r", r"'experiment=smoke\r' ends with a carriage return, as lines of"),
        ("--multirun\r", r"'--multirun\r' ends with a carriage return, as lines of Windows do"),
        ("optim.lr\r=1e-3", r"'optim.lr\r=1e-3' has in its name a carriage return, as lines of"),
        ("optim.lr=1e-3\t", r"'optim.lr=1e-3\t' ends with the character '\t'; remove it"),
        ("run_dir=x\x1b", r"'run_dir=x\x1b' ends with the character '\x1b'; remove it"),
        ("seed=1,2\x85", r"'seed=1,2\x85' ends with the character '\x85'; remove it"),
        ("\ufeffseed=1", r"'\ufeffseed=1' has in its name the character '\ufeff'; remove it"),
    ],
)
def test_a_word_with_a_character_that_nobody_sees_is_refused(word, expected):
    line = refusal("experiment=smoke", word)
    assert line.startswith(expected)
    assert ("tr -d '\\r' < FILE > NEW_FILE" in line) == ("\r" in word)


def test_a_quoted_text_may_have_any_characters():
    values, _ = values_of("experiment=smoke", 'run_name="a\tb\r"', "logger=none")
    assert values["run_name"] == "a\tb\r"
