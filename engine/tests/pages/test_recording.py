import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.pages.recording import (
    MicroBatchNorms,
    Probe,
    average_like_ddp,
)


def network(width=24):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)]
    return torch.nn.Sequential(*layers)


def backward(model, rank, step, precision, seeds=2):
    """Run backward over micro-batches; the last one averages, unless the model is told not to."""
    for index in range(seeds):
        torch.manual_seed(1000 * step + 10 * rank + index)
        last = index == seeds - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", enabled=precision == "bf16"):
                loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()


def gradients_of_three_steps(recorded, precision, kept=False, **settings):
    """Return a function that trains on one rank and returns the averaged gradients of each step.

    `kept`: gradients stay in DDP's final buckets from the first step on.
    """

    def on_rank(rank):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.0004, **settings)
        for _ in range(2 * kept):
            backward(model, rank, 9, precision)
            model.zero_grad(set_to_none=False)
        gradients = []
        for step in range(4):
            model.require_backward_grad_sync = step not in recorded
            backward(model, rank, step, precision)
            if step in recorded:
                average_like_ddp(model, in_buckets=kept)
                model.require_backward_grad_sync = True
            gradients += [parameter.grad.tolist() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad(set_to_none=not kept)
        return gradients

    return on_rank


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("as_view", [True, False])
def test_two_ranks_average_to_the_bits_of_ddp_whichever_steps_are_recorded(
    on_ranks, as_view, precision
):
    settings = {"precision": precision, "gradient_as_bucket_view": as_view}
    stock = on_ranks(2, gradients_of_three_steps((), **settings))
    assert on_ranks(2, gradients_of_three_steps((0, 2), **settings)) == stock
    assert on_ranks(2, gradients_of_three_steps((1, 2, 3), **settings)) == stock
    assert stock[0] == stock[1]


def test_three_ranks_average_to_the_bits_of_ddp_with_final_buckets(on_ranks):
    stock = on_ranks(3, gradients_of_three_steps((), "32", gradient_as_bucket_view=True))
    assert (
        on_ranks(3, gradients_of_three_steps((2, 3), "32", gradient_as_bucket_view=True)) == stock
    )


@pytest.mark.slow
def test_three_ranks_average_gradients_in_buckets_to_the_bits_of_ddp(on_ranks):
    def averages(recorded):
        steps = gradients_of_three_steps(recorded, "32", kept=True, gradient_as_bucket_view=True)
        return on_ranks(3, steps)

    stock = averages(())
    assert averages((0, 2)) == stock
    assert averages((1, 2, 3)) == stock


class PartlyUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(3))

    def forward(self, inputs):
        return self.layers[dist.get_rank()](inputs)


def test_unused_parameters_have_no_gradient_and_others_an_average(on_ranks):
    def averaged(recorded):
        def on_rank(rank):
            torch.manual_seed(1)
            model = DistributedDataParallel(PartlyUsed(), find_unused_parameters=True)
            model.require_backward_grad_sync = not recorded
            backward(model, rank, 0, "32", seeds=1)
            if recorded:
                average_like_ddp(model, in_buckets=False)
            gradients = [parameter.grad for parameter in model.parameters()]
            return [None if gradient is None else gradient.tolist() for gradient in gradients]

        return on_rank

    assert on_ranks(2, averaged(True)) == on_ranks(2, averaged(False))


def test_summed_micro_batches_equal_autograd_with_separate_norms():
    model, other = network(), network()
    norms = MicroBatchNorms(list(model.parameters()))
    expected = []
    for _ in range(3):
        inputs = torch.randn(4, 8)
        alone = torch.autograd.grad(other(inputs).sum(), list(other.parameters()))
        expected.append(sum(float(gradient.double().square().sum()) for gradient in alone))
        other(inputs).sum().backward()
        norms.before_backward()
        model(inputs).sum().backward()
        norms.after_backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)
    assert [float(gradient) for gradient in norms.squares] == pytest.approx(expected, rel=1e-5)


def test_a_probe_reads_the_values_at_its_positions():
    model = network()
    model(torch.randn(4, 8)).sum().backward()
    probe = Probe(model, values=4)
    gradients, weights = probe.gradients().numpy(), probe.split(probe.weights().numpy())
    assert [len(spots) for spots in probe.positions] == [4, 4, 4, 3]
    for index, parameter in enumerate(model.parameters()):
        spots = probe.positions[index]
        assert weights[index].tolist() == parameter.detach().flatten()[spots].tolist()
        picked = probe.split(gradients[: probe.count])[index]
        assert picked.tolist() == parameter.grad.flatten()[spots].tolist()
        assert gradients[probe.count + index] == pytest.approx(float(parameter.grad.norm()))


def test_a_probe_of_a_parameter_that_had_no_part_reads_zeros():
    assert not Probe(network(), values=2).gradients().any()
