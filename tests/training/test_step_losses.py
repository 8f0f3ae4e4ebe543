import pytest
import torch

from lockstep_gpt.training.step_losses import StepLosses


def test_the_mean_of_steps_is_kept_for_each_micro_batch():
    losses = StepLosses()
    steps = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    for step in steps:
        for index, loss in enumerate(step):
            losses.add(index, loss)
    sums = steps[0]
    for step in steps[1:]:
        sums = sums + step
    assert torch.equal(losses.take(), sums.double()[None] / 5)


def test_factors_apply_to_the_newest_step_only():
    losses = StepLosses()
    for step in ([1.0, 2.0], [4.0, 8.0]):
        for index, loss in enumerate(step):
            losses.add(index, torch.tensor(loss))
    losses.weigh([torch.tensor(0.5), torch.tensor(0.25)])
    assert losses.take().tolist() == [[(1 + 2) / 2, (2 + 2) / 2]]


def test_what_was_taken_is_not_counted_again():
    losses = StepLosses()
    losses.add(0, torch.tensor(3.0))
    losses.take()
    losses.add(0, torch.tensor(5.0))
    assert losses.take().tolist() == [[5.0]]
    with pytest.raises(AssertionError, match="before a training step"):
        losses.take()


def test_a_loss_keeps_no_graph_alive():
    weight = torch.ones((), requires_grad=True)
    losses = StepLosses()
    losses.add(0, weight * 2)
    assert not losses.take().requires_grad
