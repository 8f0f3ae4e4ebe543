import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import functional
from lockstep.functional import (
    IGNORE,
    SHORT,
    causal_attention,
    linear_cross_entropy,
    most_whole_logits,
    perplexity,
    shares_heads,
)

VOCAB, PADDED, C = 10, 64, 8


@pytest.fixture(params=["whole logits", "three rows at a time"])
def rows(request, monkeypatch):
    if request.param != "whole logits":
        monkeypatch.setattr(functional, "MANY_LOGITS", 0)
        monkeypatch.setattr(functional, "CHUNK_LOGITS", 3 * PADDED)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    features = torch.randn(2, 5, C, requires_grad=True)
    head = torch.randn(PADDED, C, requires_grad=True)
    targets = torch.randint(VOCAB, (2, 5))
    targets[0, 1] = targets[1, 4] = IGNORE
    return features, head, targets


@pytest.mark.usefixtures("rows")
def test_loss_is_torch_s_cross_entropy_of_the_unpadded_logits() -> None:
    features, head, targets = batch()
    logits = features @ head[:VOCAB].T
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(linear_cross_entropy(features, head, VOCAB, targets), expected)


@pytest.mark.usefixtures("rows")
def test_padding_rows_never_change_the_loss_nor_receive_gradient() -> None:
    features, head, targets = batch()
    loss = linear_cross_entropy(features, head, VOCAB, targets)
    loss.backward()
    head.data[VOCAB:] = 1e4
    assert head.grad[VOCAB:].abs().max() == 0
    assert torch.equal(linear_cross_entropy(features, head, VOCAB, targets), loss)


def test_compiled_logits_with_masked_padding_have_the_gradients_of_eager_ones() -> None:
    losses = []
    grads = []
    for loss_of in (
        linear_cross_entropy,
        torch.compile(linear_cross_entropy, backend="aot_eager", dynamic=False),
    ):
        features, head, targets = batch()
        head.data[VOCAB:] = 1e4
        targets[0, 0] = IGNORE
        loss = loss_of(features, head, VOCAB, targets)
        loss.backward()
        losses.append(loss.detach())
        grads.append([features.grad, head.grad])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)
    assert grads[1][1][VOCAB:].abs().max() == 0


@pytest.mark.usefixtures("rows")
def test_a_batch_of_only_ignored_targets_gives_zero_loss_and_gradient() -> None:
    features, head, targets = batch()
    loss = linear_cross_entropy(features, head, VOCAB, torch.full_like(targets, IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert features.grad.abs().max() == head.grad.abs().max() == 0


@pytest.mark.usefixtures("rows")
def test_half_precision_features_are_summed_in_float32() -> None:
    features, head, targets = (tensor.detach() for tensor in batch())
    half, weights = features.bfloat16(), head.bfloat16()
    logits = F.linear(half, weights)[..., :VOCAB].float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = linear_cross_entropy(half, weights, VOCAB, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.usefixtures("rows")
def test_gradients_equal_torch_s(dtype, error):
    features, head, targets = batch()
    mine, theirs = [
        [each.detach().to(dtype).requires_grad_() for each in (features, head)] for _ in range(2)
    ]
    (3 * linear_cross_entropy(mine[0], mine[1], VOCAB, targets)).backward()
    logits = (theirs[0] @ theirs[1][:VOCAB].T).flatten(0, 1)
    (3 * F.cross_entropy(logits, targets.flatten())).backward()
    for ours, reference in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, reference.grad, rtol=error, atol=error)


@pytest.mark.usefixtures("rows")
def test_under_autocast_the_products_are_bfloat16_and_the_gradients_float32():
    features, head, targets = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(features, head, VOCAB, targets)
    loss.backward()
    exact = linear_cross_entropy(features.double(), head.double(), VOCAB, targets)
    assert 0 < abs(loss.item() - exact.item()) < 0.02
    assert features.grad.dtype == head.grad.dtype == torch.float32


@pytest.mark.usefixtures("rows")
def test_without_grad_no_gradient_is_computed():
    features, head, targets = batch()
    head = torch.nn.Parameter(head.detach())
    products = 0

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal products
            products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        linear_cross_entropy(features.detach(), head, VOCAB, targets)  # done once
        with Products():
            loss = linear_cross_entropy(features.detach(), head, VOCAB, targets)
    assert products == math.ceil(10 / 3) if functional.MANY_LOGITS == 0 else 1
    assert torch.equal(loss, linear_cross_entropy(features, head, VOCAB, targets))


def test_a_compiled_loss_on_a_gpu_is_not_chunked_while_logits_fit(monkeypatch):
    memory = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    gpu = torch.device("cuda")
    assert most_whole_logits(gpu) == functional.MANY_LOGITS  # eager code would keep three copies
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert most_whole_logits(gpu) == 3_000_000_000  # in float32 15 % of its memory
    assert most_whole_logits(torch.device("cpu")) == functional.MANY_LOGITS


@pytest.mark.filterwarnings("ignore:.+ should not be instantiated:DeprecationWarning")  # torch's
def test_chunks_compile_in_one_graph(monkeypatch):
    """As on GPUs; on CPUs they are excluded from the graph."""
    monkeypatch.setattr(functional, "CHUNK_LOGITS", 3 * PADDED)
    features, head, targets = batch()

    def loss(features, head):
        flat = features.flatten(0, -2), head, VOCAB, targets.flatten()
        return functional.ChunkedCrossEntropy.apply(*flat)

    found = []
    for each in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        features.grad = head.grad = None
        value = each(features, head)
        value.backward()
        found.append((value.detach(), features.grad, head.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("length", [1, 7, SHORT, SHORT + 1])
def test_attention_of_every_length_equals_torch_s(length):
    q, k, v = torch.randn(3, 2, 4, length, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(causal_attention(q, k, v, 0.0), expected, atol=1e-6)


def attended(attend, heads, length, dtype):
    """Return what 4 heads of queries and `heads` of keys and values give, and their gradients."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, length, count, 8, generator=source).to(dtype).requires_grad_()
        for count in (4, heads, heads)
    )
    y = attend(*(x.transpose(1, 2) for x in (q, k, v)))
    y.backward(torch.randn(y.shape, generator=source).to(dtype))
    return y.detach(), q.grad, k.grad, v.grad


def attend_with_copies(q, k, v):
    k, v = (x.repeat_interleave(4 // x.shape[1], dim=1) for x in (k, v))
    return causal_attention(q, k, v, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_on_a_cpu_shared_keys_have_the_bits_of_copied_ones(heads, length, dtype):
    shape = heads, length, dtype
    ours = attended(lambda *qkv: causal_attention(*qkv, 0.0), *shape)
    for mine, reference in zip(ours, attended(attend_with_copies, *shape), strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("heads", [1, 2])
def test_a_kernel_that_shares_keys_gets_them_without_copies(monkeypatch, heads):
    expected = attended(attend_with_copies, heads, SHORT + 1, torch.float32)
    kernel, given = F.scaled_dot_product_attention, []

    def attend(q, k, v, **settings):
        given.append((k.shape[1], v.shape[1], settings["enable_gqa"]))
        return kernel(q, k, v, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(functional, "shares_heads", lambda _: True)
    for attention in (causal_attention, torch.compile(causal_attention, backend="aot_eager")):
        shape = heads, SHORT + 1, torch.float32
        ours = attended(lambda *qkv, run=attention: run(*qkv, 0.0), *shape)
        torch.testing.assert_close(ours, expected)
        assert given.pop() == (heads, heads, True)


@pytest.mark.parametrize(
    ("length", "dropout", "kernels"),
    [(SHORT, 0.0, []), (SHORT, 0.1, []), (SHORT + 1, 0.0, ["flash"]), (SHORT + 1, 0.1, ["math"])],
)
def test_plain_products_compute_short_attention_on_a_cpu(
    length, dropout, kernels, attention_operations
):
    q = torch.zeros(2, 2, length, 8)
    with attention_operations() as ran:
        causal_attention(q, q, q, dropout)
    assert ran == kernels


@pytest.mark.parametrize(
    ("is_cuda", "major", "dtype", "width", "shares"),
    [
        (True, 9, torch.bfloat16, 128, True),
        (True, 8, torch.float16, 64, True),
        (True, 7, torch.float16, 64, False),  # no FlashAttention on a T4
        (True, 9, torch.float32, 64, False),  # nor in float32
        (True, 9, torch.bfloat16, 256, False),
        (False, 9, torch.bfloat16, 64, False),
    ],
)
def test_only_kernels_that_share_keys_are_asked_to(
    monkeypatch, is_cuda, major, dtype, width, shares
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    shape = (1, 4, 256, width)
    q = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=shape, device=torch.device("cuda"))
    assert shares_heads(q) == shares


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (2.0, math.exp(2)), (1e9, math.exp(709))]
)
def test_the_perplexity_of_any_loss_is_finite(loss, expected):
    assert perplexity(loss) == pytest.approx(expected)
