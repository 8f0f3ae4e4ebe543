"""Tests that need a GPU: `python3 scripts/dev.py test -m gpu`; skipped if there is none.

`runs/gpu_report.txt` gets a line for each test of each run, with its measurements.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep import functional

pytestmark = pytest.mark.gpu
ONE = ("trainer=gpu", "trainer.devices=1")
TWO = ("trainer=gpu", "trainer.devices=2", "strategy=ddp")
EXACT = "+trainer.deterministic=true"  # otherwise, atomics in backward may round in another order
BENCHMARK = Path(__file__).parents[2] / "lab/benchmark.py"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
OPTIMIZERS = {
    "adamw": (),
    "muon": ("optim=muon", "model=modern_nano", "model.ngram_rows=0"),
}
KILLER = """
import os, signal, lightning
class Killer(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        last = trainer.world_size - 1
        if trainer.global_step == 13 and trainer.global_rank == last and not os.path.exists("hit"):
            open("hit", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
SLEEPER = """
import time, lightning
class Sleeper(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            time.sleep(600)
"""


def weights(command, run):
    path = command.folder / run / "checkpoints/step=000020.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def train_with_a_kill(command, *words):
    """Train undisturbed, then with a kill after step 13; return both runs' weights, and seconds."""
    (command.folder / "killer.py").write_text(KILLER)
    command.train(*words, EXACT, "run_dir=whole")
    kill = ("+callbacks.killer._target_=killer.Killer", "run_dir=killed")
    started = time.monotonic()
    stderr = command.train(*words, EXACT, *kill, PYTHONPATH=str(command.folder)).stderr
    assert "was killed by SIGKILL; restarting all ranks (1 of 3)" in stderr
    return weights(command, "whole"), weights(command, "killed"), time.monotonic() - started


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_machine_is_named(record_property):
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    facts = {
        "gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
    }
    for name, value in facts.items():
        record_property(name, str(value))  # workers can't send other types, as TorchVersion


def test_nccl_trains_at_world_size_one(command):
    command.train(*ONE, "strategy=ddp", "run_dir=nccl")
    assert command.summary("nccl")["status"] == "done"


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("32-true", 1e-3), ("bf16-mixed", 3e-2), ("16-mixed", 3e-2)]
)
def test_gpu_gives_the_losses_of_the_cpu(command, record_property, precision, tolerance):
    command.train("trainer=cpu", "run_dir=cpu")
    command.train(*ONE, f"precision={precision}", "run_dir=gpu")
    cpu, gpu = (command.summary(run)["val_loss"] for run in ("cpu", "gpu"))
    record_property("difference", f"{gpu - cpu:.2e}")
    assert gpu == pytest.approx(cpu, abs=tolerance)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_compiled_run_gives_the_losses_of_an_eager_one(command, record_property, precision):
    words = (*ONE, f"precision={precision}", "batch.micro_size=4")
    command.train(*words, "run_dir=eager")
    command.train(*words, "compile=true", "run_dir=compiled")
    eager, compiled = (command.summary(run) for run in ("eager", "compiled"))
    record_property("first step", f"{compiled['first_step_seconds']:.1f} s")
    assert compiled["val_loss"] == pytest.approx(eager["val_loss"], abs=3e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd")  # torch's
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("architecture", ["gpt", "modern"])
def test_each_tensor_s_gradient_in_bfloat16_is_that_of_float32(
    gradients, wrong_gradients, record_property, architecture, compiled, in_chunks
):
    torch._dynamo.reset()
    shape = {"tokens": 256, "width": 128}
    errors = gradients(architecture, "cuda", in_chunks=in_chunks, **shape).errors(compiled)
    record_property("largest error", f"{max(errors.values()):.1e}")
    assert not wrong_gradients(errors)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_killed(command, optimizer, precision):
    words = (*ONE, f"precision={precision}", *OPTIMIZERS[optimizer])
    undisturbed, killed, _ = train_with_a_kill(command, *words)
    assert same(undisturbed, killed)


@two_gpus
def test_two_nccl_ranks_give_the_losses_of_one(command):
    command.train(*ONE, "run_dir=one")
    command.train(*TWO, "run_dir=two")
    one, two = (command.summary(run)["val_loss"] for run in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-3)


@two_gpus
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_a_killed_nccl_rank_all_restart_soon(command, record_property, optimizer):
    undisturbed, killed, seconds = train_with_a_kill(command, *TWO, *OPTIMIZERS[optimizer])
    record_property("seconds with a kill", f"{seconds:.0f}")
    assert seconds < 180  # not the minutes of a watchdog
    assert same(undisturbed, killed)


@two_gpus
@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_compressed_gradients_come_close(command, hook):
    command.train(*TWO, "run_dir=plain")
    command.train(*TWO, f"strategy.comm_hook={hook}", "run_dir=short")
    plain, short = (command.summary(run)["val_loss"] for run in ("plain", "short"))
    assert short == pytest.approx(plain, abs=3e-2)


@two_gpus
def test_a_rank_that_hangs_under_nccl_is_shown_by_the_guard(command):
    (command.folder / "sleeper.py").write_text(SLEEPER)
    words = ("+callbacks.sleeper._target_=sleeper.Sleeper", "guard.stall_after=20", "run_dir=run")
    stderr = command.train(*TWO, *words, status=1, PYTHONPATH=str(command.folder)).stderr
    for rank in (0, 1):
        assert f"rank {rank}: no step for 20 s (guard.stall_after); its stack:" in stderr
        trace = command.folder / f"run/ranks/nccl_trace_rank_{rank}"
        assert trace.stat().st_size > 0
    assert "restarting" not in stderr


@two_gpus
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shards_of_a_model_survive_a_kill(command, optimizer, compiled):
    words = ("trainer=gpu", "trainer.devices=2", "strategy=fsdp2", f"compile={compiled}")
    words = (*words, *OPTIMIZERS[optimizer], "batch.micro_size=2")
    undisturbed, killed, _ = train_with_a_kill(command, *words)
    assert same(undisturbed, killed)


@two_gpus
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_muon_s_matrices_that_meet_over_nccl_give_the_losses_of_one_gpu(
    command, record_property, precision
):
    words = (*OPTIMIZERS["muon"], f"precision={precision}")
    command.train(*ONE, *words, "run_dir=one")
    shards = ("trainer=gpu", "trainer.devices=2", "strategy=fsdp2")
    command.train(*shards, *words, "run_dir=shards")
    one, two = (command.summary(run)["val_loss"] for run in ("one", "shards"))
    record_property("difference", f"{two - one:.2e}")
    assert two == pytest.approx(one, abs=3e-2)


@two_gpus
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("model", [(), OPTIMIZERS["muon"][1:]], ids=["gpt", "modern"])
def test_two_gpus_that_split_a_model_give_the_losses_of_one(command, model, compiled):
    words = (*model, "model.dropout=0", f"compile={compiled}")
    split = ("strategy=fsdp2", "strategy.tensor_parallel=2")
    command.train(*ONE, *words, "run_dir=one")
    command.train("trainer=gpu", "trainer.devices=2", *split, *words, "run_dir=split")
    one, two = (command.summary(run)["val_loss"] for run in ("one", "split"))
    assert two == pytest.approx(one, abs=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_the_loss_of_a_large_vocabulary_has_the_gradients_of_plain_logits(dtype, tolerance):
    torch.manual_seed(0)
    vocab_size, padded, width, tokens = 50_257, 50_304, 128, 4096
    features = torch.randn(1, tokens, width, device="cuda", dtype=getattr(torch, dtype))
    head = torch.randn(padded, width, device="cuda", dtype=getattr(torch, dtype)) * 0.02
    targets = torch.randint(vocab_size, (1, tokens), device="cuda")
    results = []
    for exact in (False, True):
        ours = [(tensor.double() if exact else tensor).clone() for tensor in (features, head)]
        leaves = [tensor.requires_grad_() for tensor in ours]
        if exact:
            logits = leaves[0][0] @ leaves[1][:vocab_size].T
            loss = F.cross_entropy(logits, targets[0])
        else:
            loss = functional.linear_cross_entropy(*leaves, vocab_size, targets)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        difference = (ours.double() - theirs).norm() / theirs.norm()
        assert difference < tolerance


@pytest.mark.parametrize("heads", [1, 2])
def test_shared_keys_have_the_results_and_gradients_of_copied_ones(heads):
    source = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(2, 256, count, 64, generator=source, device="cuda", dtype=torch.bfloat16)
        for count in (8, heads, heads, 8)
    ]
    results = []
    for is_copied in (False, True):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        if is_copied:
            k, v = (x.repeat_interleave(8 // heads, dim=1) for x in (k, v))
        y = functional.causal_attention(q, k, v, 0.0)
        y.backward(given[3].transpose(1, 2))
        results.append([y, *(leaf.grad for leaf in leaves)])
    for ours, reference in zip(*results, strict=True):
        assert (ours - reference).norm() < 2e-2 * reference.norm()


@pytest.mark.skipif(not BENCHMARK.exists(), reason="the template's own")
def test_our_command_is_as_fast_as_a_plain_loop(tmp_path, record_property):
    file = tmp_path / "speed.json"
    words = ["--device", "cuda", "--models", "gpt2", "--precisions", "bf16-mixed", "--rounds", "1"]
    words += ["--loops", "plain,ours", "--compile", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    tokens = 32 * 1024 * 8  # of a step of that model
    for loop, rounds in result["loops"].items():
        record_property(f"{loop} tokens/s", f"{tokens / rounds[0]['step_seconds']:,.0f}")
    plain, ours = (result["loops"][name][0]["step_seconds"] for name in ("plain", "ours"))
    assert ours < 1.1 * plain


SYNC_BATCHNORM = """
import sys
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
joined = torch.randn(16, 3, device="cuda") * 5 + 2
model = TorchSyncBatchNorm().apply(torch.nn.Sequential(torch.nn.BatchNorm1d(3))).cuda()
reference = torch.nn.BatchNorm1d(3).cuda()
mine = model(joined[rank * 8 : rank * 8 + 8])
expected = reference(joined)[rank * 8 : rank * 8 + 8]
torch.testing.assert_close(mine, expected)
torch.testing.assert_close(model[0].running_mean, reference.running_mean)
torch.testing.assert_close(model[0].running_var, reference.running_var)
dist.destroy_process_group()
"""


def test_sync_batchnorm_has_the_statistics_of_the_joined_batch(tmp_path):
    script = tmp_path / "sync.py"
    script.write_text(SYNC_BATCHNORM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


TWO_ON_ONE = """
import os, sys
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if two machines had one GPU each
import lockstep_gpt
from lockstep.commands import main
sys.exit(main(sys.argv[1:]))
"""


def test_two_gloo_ranks_on_one_gpu_give_the_losses_of_the_cpu(command):
    script = command.folder / "two.py"
    script.write_text(TWO_ON_ONE)
    command.train("trainer=cpu", "run_dir=cpu")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    backend = "strategy.process_group_backend=gloo"
    words = command.smoke("trainer=gpu", "trainer.devices=auto", backend, "run_dir=gpu")
    status, _, err = command.run_words([*launch, *words])
    assert status == 0, err
    assert command.summary("gpu")["val_loss"] == pytest.approx(
        command.summary("cpu")["val_loss"], abs=1e-3
    )


def test_generate_continues_on_a_gpu_as_on_the_cpu(command):
    command.train("trainer=cpu", "run_dir=run")
    python = [sys.executable, "-m", "lockstep_gpt"]
    words = [*python, "generate", "run", "--temperature", "0"]
    on_cpu = command.run_words(["env", "CUDA_VISIBLE_DEVICES=", *words])
    assert on_cpu[0] == 0, on_cpu
    assert command.run_words(words) == on_cpu
