from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

from lockstep_gpt.errors import UserError
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training import ending
from lockstep_gpt.training.train import conclude


class BatchNormModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_trainers_option_converts_batchnorm_and_keeps_its_state():
    model = BatchNormModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = TorchSyncBatchNorm().apply(model)
    assert isinstance(converted.layers[1], torch.nn.SyncBatchNorm)
    assert converted.state_dict().keys() == before.keys()
    assert all(torch.equal(converted.state_dict()[name], before[name]) for name in before)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
def test_compiling_in_place_keeps_the_names_of_weights():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = list(model.state_dict())
    model.compile(dynamic=False)
    assert list(model.state_dict()) == before


def test_a_loss_of_peers_is_not_hidden_by_checkpoints_that_cannot_be_read(monkeypatch, tmp_path):
    def refuse(*_):
        raise UserError("checkpoints cannot be read")

    monkeypatch.setattr(ending, "write_summary", refuse)
    training = SimpleNamespace(
        directory=RunDirectory(tmp_path),
        schedule=SimpleNamespace(peak=0.1),
        batch=SimpleNamespace(world_size=2, global_size=4),
        trainer=SimpleNamespace(loggers=[]),
    )
    conclude(training, "failed", {})
    with pytest.raises(UserError, match="cannot be read"):
        conclude(training, "done", {})
