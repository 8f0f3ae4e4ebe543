"""`lockstep.main` in a program of somebody else, with Hydra and Lightning: real ranks, no GPT."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import torch
import yaml

PROGRAM = """
import lightning, lockstep, torch
from lightning import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.x[index].sum().view(1)}


class Data(LightningDataModule):
    def __init__(self, seed, micro_size):
        super().__init__()
        self.seed, self.micro_size = seed, micro_size

    def train_dataloader(self):
        return lockstep.train_loader(Points(96), self.micro_size, self.trainer, seed=self.seed)

    def val_dataloader(self):
        return lockstep.eval_loader(Points(32), self.micro_size, self.trainer)


class Module(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.net, self.lr = nn.Linear(4, 1), lr

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("val/loss", loss, batch_size=len(batch["x"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


def build(cfg, run):
    torch.manual_seed(cfg.seed)
    micro_size = cfg.batch_size // run.ranks.world_size
    saving = lockstep.Checkpoints(run, every=cfg.every, keep_last=9, monitor="val/loss")
    trainer = Trainer(
        **cfg.trainer,
        callbacks=[lockstep.GracefulStop(), saving, *(Slow(),) * cfg.slow],
        logger=[run.metrics_csv],
        plugins=run.plugins,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return Module(cfg.opt.lr), Data(cfg.seed, micro_size), trainer


class Slow(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        import time
        time.sleep(0.2)


@lockstep.main("conf", "train")
def main(cfg, run):
    module, data, trainer = build(cfg, run)
    run.announce(trainer, data="points")
    trainer.fit(module, data, ckpt_path=run.checkpoint(trainer))
    return run.finish(trainer, "val/loss")


if __name__ == "__main__":
    main()
"""
TRAIN = """
defaults: [{opt: adam}, _self_]
seed: 1
batch_size: 12
every: 8
slow: 0
kept: [seed, batch_size, opt.name]
run_dir: null
trainer: {accelerator: cpu, devices: 1, max_steps: 16, val_check_interval: 8, log_every_n_steps: 4}
"""
OPTIONS = {"adam": "{lr: 0.01, name: adam}", "fast": "{lr: 0.1, name: fast}"}


class Program:
    """A folder with the program, and what runs it there."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        self.write("train.py", PROGRAM)
        self.write("conf/train.yaml", TRAIN)
        for name, text in OPTIONS.items():
            self.write(f"conf/opt/{name}.yaml", text)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, *words, program=("train.py",), **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(
            [self.python, *program, *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words, status=0, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=240)
        assert process.returncode == status, out + err
        return out, err

    def weights(self, run, step=16):
        saved = torch.load(self.folder / run / f"checkpoints/step={step:06}.ckpt")
        return saved["weights"][step]

    def summary(self, run):
        return json.loads((self.folder / run / "summary.json").read_text())


@pytest.fixture
def program(tmp_path, python_of_forks):
    return Program(tmp_path, python_of_forks)


def test_a_run_is_frozen_measured_and_saved_in_its_directory(program):
    out, _ = program.run("run_dir=r")
    assert re.search(r"^  data +points$", out, re.MULTILINE)
    assert "done in" in out
    frozen = yaml.safe_load((program.folder / "r/config.yaml").read_text())
    assert frozen["opt"] == {"lr": 0.01, "name": "adam"}
    summary = program.summary("r")
    assert (summary["status"], summary["step"]) == ("done", 16)
    assert summary["value"] == summary["monitored_value"]
    assert (program.folder / "r/metrics.csv").read_text().startswith("trainer/step,val/loss")
    program.run("run_dir=r", status=2)  # no second run there
    out, _ = program.run("run_dir=r", "resume=auto")
    assert "is done" in out


def test_ranks_of_a_script_and_of_a_launcher_train_as_one(program):
    program.run("run_dir=one")
    program.run("run_dir=two", "trainer.devices=2")
    launch = ("-m", "torch.distributed.run", "--nproc_per_node=2", "train.py")
    program.run("run_dir=torchrun", "trainer.devices=auto", program=launch)
    one, two, launched = (
        torch.load(program.folder / run / "checkpoints/step=000016.ckpt")["state_dict"]
        for run in ("one", "two", "torchrun")
    )
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(two[name], launched[name])


def wait_until(process, holds, seconds=120):
    limit = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["rank", "command"])
def test_what_a_kill_interrupts_continues_with_the_same_bits(program, victim, processes_of):
    program.run("run_dir=whole", "trainer.devices=2")
    place = f"run_dir={program.folder / 'r'}"  # by which its processes are found
    process = program.start(place, "trainer.devices=2", "slow=1")
    saved = program.folder / "r/checkpoints/step=000008.ckpt.sha256"
    wait_until(process, saved.exists)
    if victim == "rank":
        os.kill(max(processes_of(program.folder / "r")), signal.SIGKILL)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        assert "restarting all ranks" in err
    else:
        process.kill()
        process.communicate()
        program.run(place, "resume=auto", "slow=0")
    assert program.weights("r") == program.weights("whole")


def test_a_stop_signal_saves_and_a_resume_may_change_what_is_not_kept(program):
    process = program.start("run_dir=r", "slow=1", "every=100")
    wait_until(process, (program.folder / "r/metrics.csv").exists)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert "train.py run_dir=r resume=auto" in out + err
    assert program.summary("r")["status"] == "stopped"
    words = ("run_dir=r", "resume=auto", "slow=0")
    _, err = program.run(*words, "seed=2", status=2)
    assert "run_dir=r keeps its settings, but got seed=2 instead of 1" in err
    _, err = program.run(*words, "opt=fast", status=2)
    assert "opt.name=fast instead of adam" in err
    out, _ = program.run(*words, "opt.lr=0.02", "trainer.max_steps=20")
    assert "opt.lr: 0.01 -> 0.02" in out
    assert program.summary("r")["step"] == 20
    frozen = yaml.safe_load((program.folder / "r/config.yaml").read_text())
    assert (frozen["opt"]["lr"], frozen["trainer"]["max_steps"]) == (0.02, 20)


def test_a_sweep_runs_each_job_and_compares_what_they_return(program):
    out, _ = program.run("--multirun", "opt.lr=0.01,nan,0.1", "run_dir=s", status=1)
    values = [program.summary(f"s/{job}").get("value") for job in range(3)]
    assert values[0] > values[2] > 0
    table = out[out.index("job  exit") :].splitlines()[1:]
    assert [line.split()[:2] for line in table] == [["0", "0"], ["1", "1"], ["2", "0"]]
    assert table[2].split()[2:] == [f"{values[2]:.4f}", "opt.lr=0.1"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["opt.lrr=1"], "train.py: unknown setting opt.lrr; did you mean opt.lr?"),
        (["opt=adm"], "train.py: opt=adm is not one of adam, fast; did you mean adam?"),
        (["trainer.devices=0"], "trainer.devices=0 must be auto or a whole number of at least 1"),
        (["trainer.accelerator=gpu"], "trainer.accelerator=gpu needs a GPU, but no GPUs were fou"),
        (["launch.restarts=1"], "launch.restarts is not one of inline, keep_memory, max_restarts"),
        (["run_dir=train.py"], "run_dir=train.py is a file"),
        (["opt.lr=[1"], "opt.lr=[1: "),
        (
            ["+stop._target_=lightning.pytorch.callbacks.Timr"],
            "lightning.pytorch.callbacks has no Timr; did you mean Timer?",
        ),
        (["+new={_target_: torch.optim.Adam, lrr: 1}"], "new.lrr=1: Adam has no argument lrr; did"),
    ],
)
def test_a_mistake_ends_the_command_in_one_line(program, words, line):
    _, err = program.run(*words, status=2)
    assert err.count("\n") == 1
    assert line in err


def test_an_error_in_the_program_shows_its_traceback_once(program):
    program.write("train.py", PROGRAM.replace("module, data, trainer = build", "1 / 0; build"))
    _, err = program.run("run_dir=r", "trainer.devices=2", status=1)
    assert err.count("ZeroDivisionError: division by zero\n") == 1
    assert "rank " in err.splitlines()[-1]
    assert json.loads((program.folder / "r/failed.json").read_text())


PLAIN = """
import hydra, lightning, lockstep
from hydra.core.hydra_config import HydraConfig


@lockstep.main(config_path="conf", config_name="train", version_base="1.3")
def main(cfg):
    print("in", HydraConfig.get().runtime.output_dir, cfg.trainer.devices)
    return {"value": cfg.seed}["value"]


if __name__ == "__main__":
    main()
"""


def test_a_function_of_the_configuration_alone_is_called_as_hydra_calls_it(program):
    program.write("train.py", PLAIN)
    out, _ = program.run()
    (place,) = (program.folder / "outputs").glob("*/*")
    assert f"in {place} 1" in out
    assert program.summary(place)["value"] == 1
    assert (place / ".hydra/overrides.yaml").is_file()
    out, _ = program.run("--cfg", "job")
    assert yaml.safe_load(out)["seed"] == 1
    program.run("hydra.run.dir=here", "launch.inline=true", "+resume=auto")
    assert program.summary("here")["value"] == 1


def test_a_module_is_run_as_well(program):
    out, _ = program.run("run_dir=r", program=("-m", "train"))
    assert "done in" in out


HANDLED = """
    try:
        trainer.fit(module, data, ckpt_path=run.checkpoint(trainer))
    except ZeroDivisionError:
        print("handled")
"""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_failure_that_the_program_handles_is_none(program, devices):
    fit = re.search(r"^    trainer\.fit\(.+\)\n", PROGRAM, re.MULTILINE)
    raising = "class Raises(lightning.Callback):\n    def on_train_start(self, *_): 1 / 0\n\n\n"
    text = PROGRAM.replace(fit[0], HANDLED.lstrip("\n"), 1)
    text = text.replace("class Points", f"{raising}class Points", 1)
    text = text.replace("callbacks=[", "callbacks=[Raises(), ", 1)
    program.write("train.py", text)
    out, _ = program.run("run_dir=r", f"trainer.devices={devices}")
    assert "handled" in out
    assert program.summary("r")["status"] != "failed"
    assert not (program.folder / "r/failed.json").exists()
