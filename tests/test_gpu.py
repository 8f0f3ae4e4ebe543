"""What only a GPU can show; skipped where there is none."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_nccl_trains_at_world_size_one(command):
    command.train("trainer=gpu", "trainer.devices=1", "strategy=ddp", "run_dir=nccl")
    assert command.summary("nccl")["status"] == "done"


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-3), ("bf16-mixed", 3e-2)])
def test_gpu_gives_the_losses_of_the_cpu(command, precision, tolerance):
    command.train("trainer=cpu", "run_dir=cpu")
    command.train("trainer=gpu", "trainer.devices=1", f"precision={precision}", "run_dir=gpu")
    cpu, gpu = (command.summary(run)["val_loss"] for run in ("cpu", "gpu"))
    assert gpu == pytest.approx(cpu, abs=tolerance)


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
from lockstep_gpt.cli import main
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
