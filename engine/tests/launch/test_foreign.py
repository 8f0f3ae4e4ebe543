"""`lockstep.main` in a program whose habits are those of lightning-hydra-template.

Its function takes the configuration alone. Hydra's own settings refer to the program's. The Trainer
is built by `instantiate`. Checkpoints of Lightning's own callback have a network among their
arguments, and the best of them is tested after training.
"""

import json
import os
import signal
import subprocess
import time

import hydra
import pytest
import torch
import yaml

PROGRAM = """
import hydra, lightning, lockstep, pathlib, torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    def __init__(self, net, sizes, optimizer):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val/loss", self.training_step(batch, _), sync_dist=True)

    def test_step(self, batch, _):
        self.log("test/loss", self.training_step(batch, _), sync_dist=True)

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())


class Slow(lightning.Callback):
    def on_train_batch_end(self, *_):
        import time
        time.sleep(0.2)


def train(cfg):
    own = pathlib.Path(cfg.output_dir, "own.txt")
    torch.manual_seed(cfg.seed)
    module = hydra.utils.instantiate(cfg.model)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    callbacks = [hydra.utils.instantiate(node) for node in cfg.callbacks.values() if node]
    callbacks += [lockstep.GracefulStop(), *(Slow(),) * cfg.slow]
    trainer = hydra.utils.instantiate(
        cfg.trainer, callbacks=callbacks, plugins=lockstep.Run.current().plugins
    )
    own.touch()
    start = cfg.ckpt_path or lockstep.Run.current().checkpoint(trainer)
    trainer.fit(module, data, data, ckpt_path=start)
    trainer.test(module, data, ckpt_path=trainer.checkpoint_callback.best_model_path)
    return trainer.callback_metrics["test/loss"]


@lockstep.main(version_base="1.3", config_path="conf", config_name="train.yaml")
def main(cfg):
    return train(cfg)


if __name__ == "__main__":
    main()
"""
# Since Hydra 1.4, its own partial functions can't be pickled, so Lightning leaves them out.
LEFT_OUT = "net, optimizer"
if not hydra.__version__.startswith("1.3."):
    LEFT_OUT = "net"
    PROGRAM = PROGRAM.replace("self.hparams.optimizer(", "self.optimizer(")
    PROGRAM = PROGRAM.replace("self.net = net", "self.net, self.optimizer = net, optimizer")

TRAIN = """
task_name: mine
seed: 1
slow: 0
ckpt_path: null
logger: null
output_dir: ${hydra:runtime.output_dir}
model:
  _target_: train.Module
  net: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
  sizes: [4, 1]
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01}
callbacks:
  best:
    _target_: lightning.pytorch.callbacks.ModelCheckpoint
    dirpath: ${output_dir}/checkpoints
    filename: best
    monitor: val/loss
    save_last: true
  ours: {_target_: lockstep.Checkpoints, every: 4}
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  devices: 1
  max_epochs: 2
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
hydra:
  run: {dir: "outputs/${now:%H-%M-%S-%f}"}
  job_logging: {handlers: {file: {filename: "${hydra.runtime.output_dir}/${task_name}.log"}}}
"""


class Program:
    """A folder with the program, and what runs it there."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        self.write("train.py", PROGRAM)
        self.write("conf/train.yaml", TRAIN)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, *words, program=("train.py",)):
        return subprocess.Popen(
            [self.python, *program, *words],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words, status=0, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=240)
        assert process.returncode == status, out + err
        return out, err

    def read(self, path):
        return torch.load(self.folder / path, weights_only=True)

    def summary(self, run):
        return json.loads((self.folder / run / "summary.json").read_text())


def wait_until(process, holds, seconds=120):
    limit = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture
def program(tmp_path, python_of_forks):
    return Program(tmp_path, python_of_forks)


def test_one_directory_has_all_of_a_run_and_a_test_after_training_leaves_its_record(program):
    out, err = program.run("run_dir=r", "trainer.devices=2")
    assert "done in" in out
    assert f"checkpoints don't have {LEFT_OUT}: give these arguments" in out + err
    assert not (program.folder / "outputs").exists()
    names = {path.name for path in (program.folder / "r").iterdir()}
    assert {"mine.log", ".hydra", "own.txt", "config.yaml", "checkpoints"} <= names
    best = program.read("r/checkpoints/best.ckpt")
    assert best["hyper_parameters"] == {"sizes": [4, 1]}
    summary = program.summary("r")
    assert summary["step"] == 8
    assert summary["value"] > 0  # of a tensor
    steps = {4, 8}
    assert {*map(int, summary["weights"])} == steps  # of all that training has saved
    assert summary["best_checkpoint"]
    program.run("run_dir=r", "resume=auto", "trainer.max_epochs=3")
    assert program.read("r/checkpoints/step=000012.ckpt")["global_step"] == 12


def test_what_no_checkpoint_can_be_read_with_is_refused_before_the_first_step(program):
    state = """
    def state_dict(self):
        return {"folder": pathlib.Path("."), "sizes": [1, 2]}
"""
    callback = "class Slow(lightning.Callback):"
    text = PROGRAM.replace(callback, callback + state)
    program.write("train.py", text)
    _, err = program.run("run_dir=r", "slow=1", "~callbacks.best", status=2)
    where = "checkpoints in r/checkpoints would have callbacks.Slow.folder"
    assert f"{where}, of the kind PosixPath, which" in err


def test_it_says_that_data_without_a_state_begins_its_epoch_anew(program):
    program.run("run_dir=r", "+trainer.max_steps=3")
    out, _ = program.run("run_dir=r", "resume=auto", "+trainer.max_steps=8")
    assert "after 3 batches of an epoch, but DataLoader begins the epoch anew" in out
    assert "anew" not in program.run("run_dir=r", "resume=auto", "+trainer.max_steps=12")[0]


def test_a_last_checkpoint_that_was_measured_may_be_the_best(program):
    program.write(
        "train.py", PROGRAM.replace("trainer.checkpoint_callback.best", "callbacks[0].best")
    )
    program.run("run_dir=r", "~callbacks.best", "callbacks.ours.every=500")
    best = program.summary("r")["best_checkpoint"]
    assert best.endswith("checkpoints/step=000016.ckpt")


def test_a_fast_development_run_saves_nothing(program):
    words = ["~callbacks.best", "+trainer.fast_dev_run=true"]
    program.write("train.py", PROGRAM.replace("best_model_path)", "best_model_path or None)"))
    out, _ = program.run("run_dir=r", *words)
    assert "done in" in out
    assert not (program.folder / "r/checkpoints").exists()


def test_a_sweep_gives_each_job_its_value_and_shows_what_differs(program):
    words = ["-m", "run_dir=s", "+trainer.limit_train_batches=4", "model.optimizer.lr=0.01,nan"]
    out, _ = program.run(*words, status=1)
    table = [line.split() for line in out[out.index("job  exit") :].splitlines()[1:]]
    assert [row[3:] for row in table] == [["model.optimizer.lr=0.01"], ["model.optimizer.lr=nan"]]
    assert float(table[0][2]) > 0
    assert table[1][1:3] == ["1", "nan"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "command"])
def test_what_a_kill_interrupts_ends_with_the_same_bits(program, victim, processes_of):
    program.run("run_dir=whole", "trainer.devices=2")
    place = f"run_dir={program.folder / 'r'}"
    process = program.start(place, "trainer.devices=2", "slow=1")
    wait_until(process, (program.folder / "r/checkpoints/step=000004.ckpt.sha256").exists)
    if victim == "rank":
        os.kill(processes_of(program.folder / "r")[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        assert "restarting all ranks" in err
    else:
        process.kill()
        process.communicate()
        program.run(place, "resume=auto", "slow=0")
    whole, killed = (program.summary(run)["weights"] for run in ("whole", "r"))
    assert killed == whole


@pytest.mark.slow
def test_a_stopped_program_that_resumes_nothing_keeps_its_own_files(program):
    program.write("train.py", PROGRAM.replace("or lockstep.Run.current().checkpoint(trainer)", ""))
    place = "callbacks.best.dirpath=${output_dir}/others"
    words = ["slow=1", "~callbacks.ours", "trainer.max_epochs=99", place]
    process = program.start("run_dir=r", *words)
    wait_until(process, (program.folder / "r/others/best.ckpt.sha256").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert (program.folder / "r/own.txt").exists()


@pytest.mark.slow
def test_ranks_of_a_launcher_agree_on_one_directory(program):
    launch = ("-m", "torch.distributed.run", "--nproc_per_node=2", "train.py")
    program.run("trainer.devices=2", program=launch)
    (place,) = (program.folder / "outputs").iterdir()
    assert (place / "own.txt").exists()
    assert program.summary(place)["world_size"] == 2


def test_the_same_function_trains_without_ranks_in_a_test(program):
    program.write("conf/test.yaml", "defaults: [train]\noutput_dir: .")
    program.write(
        "test.py",
        """
import hydra, train
with hydra.initialize("conf", version_base="1.3"):
    for epochs in (1, 2):
        words = ["ckpt_path=checkpoints/last.ckpt"] if epochs == 2 else []
        cfg = hydra.compose("test", [f"trainer.max_epochs={epochs}", *words])
        print("loss", float(train.train(cfg)))
""",
    )
    out, _ = program.run(program=("test.py",))
    first, second = (float(line.split()[1]) for line in out.splitlines() if line.startswith("loss"))
    assert second < first


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trainer.devices=2", "+trainer.strategy=ddp_spawn"], "set trainer.strategy=ddp\n"),
        (["trainer.accelerator=gpu"], "set trainer.accelerator=cpu to run without one\n"),
        (["callbacks.ours.monitr=x"], "unknown setting callbacks.ours.monitr; did you mean"),
        (["callbacks.ours.every=0"], "train.py: callbacks.ours.every=0 must be at least 1\n"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(program, words, line):
    _, err = program.run("run_dir=r", *words, status=2)
    assert line in err
    assert err.count("\n") == 1
    assert not (program.folder / "r").exists()


def test_groups_of_a_frozen_configuration_may_have_any_value(program):
    program.write("train.py", PROGRAM.replace("    return train(cfg)", "    return [cfg.data] * 2"))
    program.run("run_dir=r", "+data=none", "model=null")
    assert program.summary("r")["value"] == ["none", "none"]
    frozen = yaml.safe_load((program.folder / "r/config.yaml").read_text())
    assert frozen["model"] is None
    assert json.loads(json.dumps(frozen))["output_dir"] == "${hydra:runtime.output_dir}"
