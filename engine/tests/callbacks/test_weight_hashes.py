import threading

import pytest
import torch

from lockstep.callbacks import weight_hashes
from lockstep.callbacks.weight_hashes import WeightHashes, digest
from lockstep.checkpoints.reading import checkpoint_path, newest_valid
from lockstep.checkpoints.writing import CopyingCheckpointIO


def test_the_checksum_of_weights_depends_on_names_types_shapes_and_bits():
    weight = torch.arange(6.0)
    models = [
        {"a": weight},
        {"b": weight},
        {"a": weight.view(2, 3)},
        {"a": weight.double()},
        {"a": weight.bfloat16()},
        {"a": torch.nextafter(weight, weight + 1)},
        {"a": weight, "b": torch.tensor(1)},
    ]
    sums = [digest(model) for model in models]
    assert len({*sums}) == len(models)
    assert digest({"a": torch.arange(12.0)[::2] / 2}) == sums[0]  # in any memory layout


def test_shards_of_a_model_have_no_checksum():
    assert digest({"a": torch.nn.Parameter(torch.ones(2))}) is None


@pytest.mark.parametrize("background", [False, True])
def test_in_background_only_the_writer_computes_hashes(new_run, tmp_path, monkeypatch, background):
    threads = []

    def recording(weights):
        threads.append(threading.current_thread())
        return digest(weights)

    monkeypatch.setattr(weight_hashes, "digest", recording)
    run = new_run(max_steps=3, checkpoint={"every": 1})
    hashes = WeightHashes()
    io = CopyingCheckpointIO(background=background, hashes=hashes)
    run.fit(hashes, run.checkpoints(tmp_path), io=io)
    assert len(threads) == 3
    assert (threading.main_thread() in threads) is not background


def test_hashes_are_those_of_the_saved_weights_and_survive_a_resume(new_run, tmp_path):
    written = {}
    for background in (False, True):
        folder = tmp_path / str(background)
        for steps in (2, 4):
            run = new_run(max_steps=steps, checkpoint={"every": 1, "keep_last": 9})
            hashes = WeightHashes()
            io = CopyingCheckpointIO(background=background, hashes=hashes)
            run.fit(hashes, run.checkpoints(folder), io=io, ckpt_path=newest_valid(folder))
        written[background] = [torch.load(path, weights_only=True) for path in sorted_in(folder)]
        assert written[background][-1]["weights"] == hashes.in_summary(4)["weights"]
    for content in written[True]:
        step = content["global_step"]
        assert [*content["weights"]] == [*range(1, step + 1)]
        assert content["weights"][step] == digest(content["state_dict"])
    assert [content["weights"] for content in written[False]] == [
        content["weights"] for content in written[True]
    ]


def sorted_in(folder):
    return [checkpoint_path(folder, step) for step in range(1, 5)]


@pytest.mark.slow
def test_on_any_number_of_ranks_a_run_in_background_reports_the_same_hashes(command):
    exact = ("batch.exact_micro_size=2", "checkpoint.every=5", "val_every=4")
    command.train(*exact, "trainer=cpu", "run_dir=plain")
    two = ("trainer=cpu", "trainer.devices=2", "strategy=ddp", "checkpoint.background=true")
    command.train(*exact, *two, "run_dir=background")
    weights = command.summary("background")["weights"]
    assert [*weights] == ["5", "8", "10", "15", "16", "20"]
    assert weights == command.summary("plain")["weights"]
