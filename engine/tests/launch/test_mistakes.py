"""Mistakes in names, choices, values, and YAML: one line, before any rank starts."""

import re
from pathlib import Path

import lockstep_gpt
import pytest
from lockstep_gpt import CONFIGS, PROJECT

from lockstep import commands as cli
from lockstep import configs
from lockstep.building import build
from lockstep.errors import UserError
from lockstep.launch import start

PROGRAM = PROJECT.program

PACKAGE = Path(lockstep_gpt.__file__).parent
FOLDERS = (CONFIGS, Path(configs.__file__).parent)
MODELS, STRATEGIES, LOGGERS, CALLBACKS, EXPERIMENTS = (
    ", ".join(sorted(path.stem for folder in FOLDERS for path in (folder / group).glob("*.yaml")))
    for group in ("model", "strategy", "logger", "callbacks", "experiment")
)
SAMPLE = "callbacks.sample._target_"
ORDER = "lockstep.loading.order"


def unknown(name, nearest=None):
    """Return the line about a setting that nothing has."""
    hint = f"did you mean {nearest}?" if nearest else "--cfg job shows all of them;"
    return f"unknown setting {name}; {hint} (+{name}=... would add it)"


UNKNOWN_NAMES = {
    "optim.lrr=1e-3": unknown("optim.lrr", "optim.lr"),
    "max_step=3": unknown("max_step", "max_steps"),
    "expriment=smoke": unknown("expriment", "experiment"),
    "models=nano": unknown("models", "model"),
    "optimm.lr=3": unknown("optimm.lr", "optim.lr"),
    "Model.n_layers=3": unknown("Model.n_layers", "model.n_layer"),
    "trainr.devices=2": unknown("trainr.devices", "trainer.devices"),
    "lr=0.1": unknown("lr", "optim.lr"),
    "devices=2": unknown("devices", "trainer.devices"),
    "optim.seed=3": unknown("optim.seed", "seed"),
    "data.source.path=books": "unknown setting data.source.path; choose data=huggingface or "
    "data=jsonl or data=parquet or data=shards or data=text, which has it",
    "strategy.bucket_cap=3": unknown("strategy.bucket_cap", "strategy.bucket_cap_mb"),
    "logger.wandb.mod=off": unknown("logger.wandb.mod", "logger.wandb.mode"),
    "logers.wandb.mode=off": unknown("logers.wandb.mode", "logger.wandb.mode"),
    "logger.project=x": unknown("logger.project", "logger.wandb.project"),
    "qq.zz=3": unknown("qq.zz"),
    "batch.x.y=3": unknown("batch.x.y"),
    "trainer.profile=simple": unknown("trainer.profile", "trainer.profiler"),
    "+trainer.profile=simple": "trainer.profile=simple: Trainer has no argument profile; "
    "did you mean profiler?",
    f"{SAMPLE}={ORDER}.Ordr": f"{SAMPLE}={ORDER}.Ordr: {ORDER} has no Ordr; did you mean Order?",
}
STOP = "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
# As users of other templates for Lightning and Hydra type them.
KNOWN_ELSEWHERE = {
    "ckpt_path=runs/a/last.ckpt": "unknown setting ckpt_path; set resume=CHECKPOINT, or "
    "run_dir=RUN resume=auto to continue a run",
    "data.batch_size=64": "unknown setting data.batch_size; set batch.global_size, of all devices, "
    "or batch.micro_size",
    "data.num_workers=2": "unknown setting data.num_workers; leave it out, since a thread reads "
    "the tokens",
    "debug=fdr": "unknown setting debug; set experiment=debug, or trainer.fast_dev_run=true, "
    "trainer.overfit_batches=3, max_steps=20, or trainer.profiler=simple",
    "callbacks.early_stopping.patience=9": "unknown setting callbacks.early_stopping.patience; set "
    f"{STOP} +callbacks.stop.monitor=val/loss",
    "extras.print_config=false": "unknown setting extras.print_config; leave it out; --cfg job "
    "prints the settings",
    "hparams_search=mnist_optuna": "unknown setting hparams_search; set --multirun "
    "experiment=search",
    "local=default": "unknown setting local; add --config-dir FOLDER, which has YAML files of "
    "yours",
    "model.scheduler.patience=3": "unknown setting model.scheduler.patience; set schedule.warmup "
    "or schedule.decay",
    "model.lr=0.1": unknown("model.lr", "optim.lr"),
    "model.optimizer.lr=0.1": unknown("model.optimizer.lr", "optim.lr"),
    "optimized_metric=val/loss": "unknown setting optimized_metric; set checkpoint.monitor, which "
    "a sweep compares",
    "paths.data_dir=/data": "unknown setting paths.data_dir; set data.root",
    "paths.output_dir=/out": "unknown setting paths.output_dir; set run_dir",
    "task_name=mine": "unknown setting task_name; set run_dir or run_name",
    "train=false": "unknown setting train; leave it out; without training, evaluate RUN measures",
    "trainer=ddp": "trainer=ddp is not one of auto, cpu, gpu, mps; did you mean strategy=ddp?",
    "trainer=ddp_sim": "trainer=ddp_sim is not one of auto, cpu, gpu, mps; set trainer=cpu "
    "strategy=ddp",
    "logger=csv": f"logger=csv is not one of {LOGGERS}; set logger=none, since every run writes "
    "metrics.csv",
    "logger=null": f"logger=null is not one of {LOGGERS}; set logger=none",
    "callbacks=none": f"callbacks=none is not one of {CALLBACKS}; set callbacks=[] for none",
    "callbacks=null": f"callbacks=null is not one of {CALLBACKS}; set callbacks=[] for none",
    "experiment=null": f"experiment=null is not one of {EXPERIMENTS}; set experiment=[] for none",
    "callbacks=early_stopping": f"callbacks=early_stopping is not one of {CALLBACKS}; set {STOP} "
    "+callbacks.stop.monitor=val/loss",
    "trainer.strategy=ddp_spawn": "trainer.strategy=ddp_spawn starts ranks by itself, but "
    "lockstep.main does; set strategy=ddp",
}
UNUSED = "ddp_find_unused_parameters_true"
WRONG_CHOICES = {
    "model=gpt2_mediun": f"model=gpt2_mediun is not one of {MODELS}; did you mean gpt2_medium?",
    "experiment=qq": f"experiment=qq is not one of {EXPERIMENTS}",
    "callbacks=[default,qq]": f"callbacks=qq is not one of {CALLBACKS}",
    "strategy=3": f"strategy=3 is not one of {STRATEGIES}",
    "logger=none hydra/launcher=qq": "hydra/launcher=qq is not one of basic",
    # As Lightning advises.
    f"strategy={UNUSED}": f"strategy={UNUSED} is not one of {STRATEGIES}; set strategy=ddp "
    "strategy.find_unused_parameters=true",
    "verbosity=loud": "verbosity=loud is not one of quiet, normal, debug",
}
WRONG_VALUES = {
    "max_steps=many": "max_steps=many must be a whole number",
    "seed=1.5": "seed=1.5 must be a whole number",
    "optim.lr=fast": "optim.lr=fast must be a number",
    "compile=perhaps": "compile=perhaps must be true or false",
    "resume=runs/nothing": "resume=runs/nothing does not exist; give none, auto, a run directory, "
    "or a checkpoint",
    "batch=12": "batch=12 is a group; set batch.NAME, or null",
    "callbacks.sample=off": "callbacks.sample=off is a group; set callbacks.sample.NAME, or null",
    "data=text": "data.source.path must be set, as in data.source.path=VALUE",
    "model.block_size=???": "model.block_size must be set, as in model.block_size=VALUE",
}
IN_YAML = {
    "trainer: {max_step: 3}": "trainer.max_step=3 (of experiment=mine): Trainer has no argument "
    "max_step; did you mean max_steps? ~trainer.max_step would leave it out",
    "model: {heads: 2}": "model.heads=2 (of experiment=mine): GPT has no argument heads; did you "
    "mean n_head? ~model.heads would leave it out",
    "max_stepz: 3": "unknown setting max_stepz; did you mean max_steps?",
    "optim.lr: 1e-3": "'optim.lr' in a YAML file is one name with a dot in it; nest it",
    "val_every: often": "val_every=often must be a whole number",
    "optim: {lr: fast}": "optim.lr=fast must be a number",
}


def line_of(capsys, *words):
    """Return the only line of a command that is refused as a mistake, without its beginning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "start", lambda *_: pytest.fail("it isn't refused before ranks start"))
        return _line_of(capsys, *words)


def _line_of(capsys, *words):
    assert cli.main(["train", *words]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{PROGRAM} train: "), line
    assert line.count("\n") == 1, line
    return line.removeprefix(f"{PROGRAM} train: ").removesuffix("\n")


ODD_WORDS = {
    "run_dir=None": "run_dir=None is the text None; write run_dir=null for nothing",
    "run_name=None": "run_name=None is the text None; write run_name=null for nothing",
    "--lr 1e-3": "--lr is not a flag, and settings have no dashes; write lr=1e-3",
    "--max-steps=3": "--max-steps is not a flag, and settings have no dashes; write max_steps=3",
    "--trainer --resolve": (
        "--trainer is not a flag, and settings have no dashes; write trainer=VALUE"
    ),
    "--experimental-rerun x": (
        "--experimental-rerun runs whatever a file contains; use run_dir=RUN resume=auto"
    ),
    "run_dir=runs/\udce6\udc9d": (
        r"run_dir=runs/\udce6\udc9d is not ASCII, and this locale knows nothing else; run: export "
        "LC_ALL=C.UTF-8"
    ),
}


MISTAKES = ODD_WORDS | UNKNOWN_NAMES | KNOWN_ELSEWHERE | WRONG_CHOICES | WRONG_VALUES


@pytest.mark.parametrize(("words", "line"), MISTAKES.items())
def test_a_mistake_is_one_line_with_the_nearest_the_choices_or_the_rule(words, line, capsys):
    assert line_of(capsys, *words.split()) == line


SETTING = re.compile(r"(?<!--)\+?\b[a-z][\w.]*=[a-z\d][\w./]*|\b\w+=\[\]")


@pytest.mark.parametrize("line", [line for line in KNOWN_ELSEWHERE.values() if "=" in line])
def test_what_such_a_line_advises_can_be_set(line, composed):
    """Each by itself, as after an `or`; a callback's arguments need its class."""
    advised = [word for word in SETTING.findall(line.partition("; ")[2]) if "RUN" not in word]
    for word in advised:
        composed(*{STOP, word})


@pytest.fixture
def recipe(tmp_path):
    """Write an experiment; return the words that choose it."""

    def write(text):
        (tmp_path / "experiment").mkdir(exist_ok=True)
        file = tmp_path / "experiment/mine.yaml"
        file.write_text(f"# @package _global_\ndefaults: [smoke]\n{text}\n")
        return file, ["--config-dir", str(tmp_path), "experiment=mine"]

    return write


@pytest.mark.parametrize(("text", "line"), IN_YAML.items())
def test_a_mistake_in_a_yaml_file_is_the_same_line(recipe, text, line, capsys):
    assert line_of(capsys, *recipe(text)[1]) == line


def test_a_choice_that_sets_what_another_model_lacks_is_named(recipe, capsys):
    """Also if an experiment has it from another one that it begins with."""
    file, words = recipe("max_steps: 3")
    (file.parent.parent / "model").mkdir()
    own = file.parent.parent / "model/own.yaml"
    own.write_text("_target_: lockstep.batch.Batch\n_partial_: true\n")
    for experiment in ("smoke", "mine"):
        given = [*words[:2], f"experiment={experiment}", "model=own"]
        line = line_of(capsys, *given)
        assert line == (
            f"model.block_size=32 (of experiment={experiment}): Batch has no argument block_size; "
            "did you mean global_size? ~model.block_size would leave it out"
        )
    left_out = [f"~model.{name}" for name in ("block_size", "n_layer", "n_head", "n_embd")]
    assert line_of(capsys, *given, *left_out).startswith("data.block_size: Interpolation key")


@pytest.mark.parametrize(("text", "number"), [("max_steps: [1", 3), ("model:\n\tn_layer: 3", 4)])
def test_yaml_that_cannot_be_parsed_is_named_by_file_and_line(recipe, text, number, capsys):
    file, words = recipe(text)
    assert f'in "{file}", line {number}, column' in line_of(capsys, *words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("max_steps=[1", "max_steps=[1: no viable alternative at input '[1'"),
        ("max_steps", "missing EQUAL at '<EOF>'"),
        ("größe=1", "LexerNoViableAltException: größe=1"),
        ("+max_steps=3", "Either remove + prefix: 'max_steps=3'"),
        ("seed=1,2", "To sweep over it, add --multirun to your command line"),
        ("run_name=${nope}", "Interpolation key 'nope' not found"),
        ("run_name=${oc.env:LOCKED_ROOM}", "'LOCKED_ROOM' not found"),
        ("~model", "module.model: Interpolation key 'model' not found; set it"),
        ("hydra.zz=3", "unknown setting hydra.zz"),
        ("--config-name smoke", "Cannot find primary config 'smoke'."),
        ("-cp /no/such/folder", "Primary config directory not found."),
        ("-m -c job seed=1,2", "Only one of --run, --multirun, --cfg"),
    ],
)
def test_other_errors_of_hydra_are_its_own_text_in_one_line(words, part, capsys):
    assert part in line_of(capsys, *words.split())


@pytest.mark.parametrize("text", ["defaults: [data: text]"])
def test_other_errors_in_a_yaml_file_name_it(recipe, text, capsys):
    file, words = recipe("")
    file.write_text(f"# @package _global_\n{text}\n")
    assert line_of(capsys, *words).startswith("In 'experiment/mine': ")


def test_an_experiment_whose_settings_would_be_below_its_own_name_is_refused(recipe, capsys):
    file, words = recipe("")
    file.write_text("defaults: [smoke]\nmodel:\n  n_embd: 64\n")
    assert line_of(capsys, *words) == (
        "experiment: a chosen file of this group has no line `# @package _global_`, so its "
        "settings change nothing; begin the file with it"
    )


def test_a_run_that_continues_needs_a_name(capsys):
    assert line_of(capsys, "experiment=smoke", "resume=auto") == (
        "resume=auto needs run_dir=runs/NAME, the run to continue or to start; "
        "set it, or leave resume=auto out"
    )


def test_a_sweep_does_not_go_into_the_folder_of_a_run(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    for words in (["-m", "seed=1,2"], ["--multirun", "resume=auto"]):
        assert cli.main(["train", f"run_dir={run}", *words]) == 2
        err = capsys.readouterr().err
        line = f"run_dir={run} is a run, but with --multirun, run_dir is a folder of runs"
        assert err.startswith(f"{PROGRAM} train: {line}"), err
        assert err.count("\n") == 1
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "the following arguments are required: source; usage: "),
        (["generate", "run", "--promt", "x"], "unrecognized arguments: --promt x; usage: "),
        (["evaluate", "run", "data.root=x"], "unrecognized arguments: data.root=x; usage: "),
    ],
)
def test_a_wrong_word_for_a_trained_model_is_one_line_with_the_usage(words, message, capsys):
    assert cli.main(words) == 2
    line = f"{PROGRAM} {words[0]}: {message}{PROGRAM} {words[0]} [-h]"
    err = capsys.readouterr().err
    assert err.startswith(line), err
    assert err.count("\n") == 1


def test_a_class_that_cannot_be_imported_is_named_once(capfd):
    target = "lightning.pytorch.callbacks.EarlyStoping"
    with pytest.raises(UserError, match=f"^_target_={target} can't be imported; correct it"):
        build({"_target_": target})
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_torchrun_repeats_a_mistake_as_the_cause(command):
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lockstep_gpt"]
    process = command.start_python(*words, *command.smoke("trainer=cpu", "batch.global_size=7"))
    _, err = process.communicate(timeout=240)
    cause = err.partition("Root Cause")[2]
    assert f"{PROGRAM} train: batch.global_size=7 is not divisible by 2 devices" in cause


@pytest.mark.slow
def test_a_sweep_prints_each_job_once_with_its_loss(command):
    out = command.train("-m", "optim.lr=1e-3,2e-3", "max_steps=2", "run_dir=sweep").stdout
    assert out.count("job 1: optim.lr=0.002") == 1
    assert "#1 :" not in out  # Hydra's own line
    losses = [command.summary(f"sweep/{job}")["val_loss"] for job in (0, 1)]
    rows = out.splitlines()[-2:]
    assert [float(row.split()[2]) for row in rows] == [round(loss, 4) for loss in losses]
