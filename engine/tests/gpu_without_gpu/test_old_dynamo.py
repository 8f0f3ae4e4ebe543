"""Gradients of our autograd Functions, as torch 2.11 compiles them: it is installed on many GPUs.

There, Dynamo makes every tensor of `forward` an output (pytorch#180642, mended in 2.12). If one of
them is the returned tensor before a change in place, the gradient goes to the wrong output.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.variables.higher_order_ops as tracing

from lockstep import functional

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd")
VOCAB, PADDED, ROWS, C = 500, 512, 256, 32
NEEDED = ("trace_hop_function_with_auto_output_flattening", "collect_intermediate_outputs")


@pytest.fixture
def every_tensor_is_an_output(monkeypatch):
    """Let Dynamo trace a Function as in torch 2.11."""
    if not all(hasattr(tracing, name) for name in NEEDED):
        pytest.skip(f"torch {torch.__version__} traces Functions with other code")
    trace, collect = (getattr(tracing, name) for name in NEEDED)

    def trace_visibly(function, transaction, subtracer, *rest):
        result = trace(function, transaction, subtracer, *rest)
        subtracer.traced_with_externally_visible_side_effects = True
        return result

    def collect_all(transaction, subtracer, outputs, _is_filtered=True):
        return collect(transaction, subtracer, outputs, False)

    monkeypatch.setattr(tracing, NEEDED[0], trace_visibly)
    monkeypatch.setattr(tracing, NEEDED[1], collect_all)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(loss_of, is_compiled):
    """Return the loss and its gradients by features and head."""
    source = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, C, generator=source, requires_grad=True)
    head = torch.randn(PADDED, C, generator=source, requires_grad=True)
    targets = torch.randint(VOCAB, (ROWS,), generator=source)
    if is_compiled:
        loss_of = torch.compile(loss_of, backend="aot_eager", dynamic=False, fullgraph=True)
    loss = loss_of(features, head, targets)
    (3 * loss).backward()
    return loss.detach(), features.grad, head.grad


def check(loss_of):
    eager, compiled = (gradients(loss_of, is_compiled) for is_compiled in (False, True))
    assert all(gradient.norm() > 0 for gradient in eager)
    torch.testing.assert_close(compiled, eager)


class ChangedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.new_zeros(())
        total -= x.sum()
        ctx.shape = x.shape
        return total

    @staticmethod
    def backward(ctx, outer):
        return -outer.expand(ctx.shape)


@pytest.mark.usefixtures("every_tensor_is_an_output")
def test_a_returned_tensor_that_was_changed_in_place_loses_its_gradient():
    """The imitation has the fault of torch 2.11; else the tests below would show nothing."""
    _, features, head = gradients(lambda f, h, _: ChangedInPlace.apply(f) + h.sum(), True)
    assert features.norm() == 0
    assert head.norm() > 0


@pytest.mark.usefixtures("every_tensor_is_an_output")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_has_gradients(monkeypatch, dtype):
    monkeypatch.setattr(functional, "CHUNK_LOGITS", 64 * PADDED)
    apply = functional.ChunkedCrossEntropy.apply
    check(lambda f, h, targets: apply(f.to(dtype), h.to(dtype), VOCAB, targets))
