import pytest
import torch

from lockstep_gpt.training.step_losses import StepLosses


def add_step(losses, values):
    for index, value in enumerate(values):
        losses.add(index, torch.as_tensor(value))
    losses.complete_step()


def test_the_mean_of_steps_is_kept_for_each_micro_batch():
    losses = StepLosses()
    steps = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    for step in steps:
        add_step(losses, step)
    sums = steps[0]
    for step in steps[1:]:
        sums = sums + step
    assert torch.equal(losses.take(), sums.double()[None] / 5)


def test_factors_apply_to_the_current_step_only():
    losses = StepLosses()
    for step in ([1.0, 2.0], [4.0, 8.0]):
        for index, loss in enumerate(step):
            losses.add(index, torch.tensor(loss))
        if step[0] == 4:
            losses.weigh([torch.tensor(0.5), torch.tensor(0.25)])
        losses.complete_step()
    assert losses.take().tolist() == [[(1 + 2) / 2, (2 + 2) / 2]]


def test_what_was_taken_is_not_counted_again():
    losses = StepLosses()
    add_step(losses, [3.0])
    losses.take()
    add_step(losses, [5.0])
    assert losses.take().tolist() == [[5.0]]
    with pytest.raises(AssertionError, match="before a training step"):
        losses.take()


def test_a_loss_keeps_no_graph_alive():
    weight = torch.ones((), requires_grad=True)
    losses = StepLosses()
    add_step(losses, [weight * 2])
    assert not losses.take().requires_grad


def test_a_step_that_was_not_completed_is_not_saved():
    losses = StepLosses()
    add_step(losses, [1.0, 2.0])
    losses.add(0, torch.tensor(100.0))
    state = losses.state()
    assert (state["sums"].tolist(), state["steps"]) == ([[1.0, 2.0]], 1)
    losses.forget_step()
    add_step(losses, [3.0, 4.0])
    assert losses.take().tolist() == [[2.0, 3.0]]
    assert losses.state()["steps"] == 0  # nothing since then


LOSSES = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))  # (steps, micro-batches)


def row_of(steps, ranks, state=None):
    """Return the mean losses, (ranks, micro-batches), that follow a saved state, and the sums."""
    means = []
    sums = []
    for rank in range(ranks):
        losses = StepLosses()
        if state is not None:
            losses.load(state, rank, ranks, steps.shape[1] // ranks)
        for step in steps:
            add_step(losses, step.view(ranks, -1)[rank])
        sums.append(losses.state()["sums"])
        means.append(losses.take())
    return torch.cat(means), {"sums": torch.cat(sums), "steps": len(steps)}


@pytest.mark.parametrize("ranks", [8, 4, 2, 1])
def test_a_saved_sum_goes_on_with_equal_bits_on_any_number_of_ranks(ranks):
    expected, _ = row_of(LOSSES, 1)
    _, state = row_of(LOSSES[:3], 4)
    means, _ = row_of(LOSSES[3:], ranks, state)
    assert torch.equal(means.flatten(), expected.flatten())


def test_micro_batches_of_another_size_keep_the_mean():
    _, state = row_of(LOSSES[:3], 4)
    halves = LOSSES[3:].view(-1, 4, 2).mean(dim=2)  # micro-batches of twice the size
    means, _ = row_of(halves, 2, state)
    assert means.shape == (2, 2)
    assert means.mean().item() == pytest.approx(LOSSES.double().mean().item(), rel=1e-6)


def test_ranks_that_split_a_model_count_once(on_ranks):
    """Two groups of two ranks have two micro-batches each; the losses of a group are equal."""

    def losses_of(rank):
        losses = StepLosses()
        losses.copies = 2
        add_step(losses, [10.0 * (rank // 2), 10.0 * (rank // 2) + 1])
        return losses.state()["sums"].tolist(), losses.take().tolist()

    expected = [[0.0, 1.0], [10.0, 11.0]]
    assert on_ranks(4, losses_of) == [(expected, expected)] * 4
