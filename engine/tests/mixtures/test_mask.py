"""A masked model computes for each document what it computes for that document by itself."""

import copy

import lightning
import numpy as np
import pytest
import torch
from lockstep_gpt.data import Tokens
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lockstep.errors import UserError
from lockstep.functional import IGNORE, causal_attention
from lockstep.mixtures.mask import (
    DocumentBounds,
    Documents,
    MaskDocuments,
    attention_within,
    block_mask,
    flexible,
    joined,
    mask_documents,
    token_mask,
)
from lockstep.tokens.tokenizer import ByteTokenizer

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 640}
ARCHITECTURES = {
    "gpt": (GPT, {}),
    "modern": (ModernGPT, {"ngram_rows": 64, "longest_ngram": 4, "n_kv_head": 1}),
}


def model_of(name, *, masked=True, **changes):
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = kind(vocab_size=50, **{**SHAPE, **settings, **changes}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    if masked:
        mask_documents(model, ByteTokenizer())
    return model


def batch_of(*rows, seed=0):
    """Return tokens and targets of rows with documents of these lengths; the last is cut."""
    draw = np.random.default_rng(seed)
    tokens = []
    for lengths in rows:
        row = draw.integers(1, 50, sum(lengths))
        row[np.cumsum(lengths)[:-1] - 1] = 0
        tokens.append(row)
    targets = draw.integers(0, 50, (len(rows), sum(rows[0])))
    targets[0, 3] = IGNORE
    return torch.tensor(np.array(tokens)), torch.tensor(targets)


SHORT_ROWS = ([5, 1, 1, 13, 20], [40], [1, 38, 1])
LONG_ROWS = ([30, 1, 200, 9, 100, 300], [640], [3] * 200 + [40], [560, 80])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("rows", [SHORT_ROWS, LONG_ROWS], ids=["short", "long"])
def test_each_document_gets_what_it_gets_by_itself(name, rows):
    model, alone = model_of(name), model_of(name, masked=False)
    tokens, targets = batch_of(*rows)
    logits = model(tokens)
    loss, parts = model(tokens, targets), []
    for row, lengths in enumerate(rows):
        place = 0
        for length in lengths:
            document = slice(place, place + length)
            document_tokens = tokens[row : row + 1, document]
            torch.testing.assert_close(logits[row : row + 1, document], alone(document_tokens))
            own_targets = targets[row : row + 1, document]
            parts.append(alone(document_tokens, own_targets) * (own_targets != IGNORE).sum())
            place += length
    expected = sum(parts) / (targets != IGNORE).sum()
    torch.testing.assert_close(loss, expected)
    actual = gradients(model, loss)
    for name, gradient in gradients(alone, expected).items():
        torch.testing.assert_close(actual[name], gradient, msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_window_of_one_document_is_computed_as_without_the_mask(name):
    model, plain = model_of(name), model_of(name, masked=False)
    tokens, targets = batch_of([640], [640])
    tokens[:, -1] = 0  # the end of the document, after which none begins here
    assert torch.equal(model(tokens, targets), plain(tokens, targets))
    assert model.positions(tokens) == slice(640)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpointed_blocks_see_the_documents_of_their_own_forward_pass(name):
    plain, model = model_of(name), model_of(name, activation_checkpointing=True)
    first, second = batch_of(*LONG_ROWS), batch_of(*LONG_ROWS[::-1], seed=1)

    def both(which):
        return which(*first) + which(*second)  # the second forward comes before both backwards

    expected = gradients(plain, both(plain))
    for name, gradient in gradients(model, both(model)).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks, and hides its own warning
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_models_see_the_same_documents(name, checkpointing):
    plain = model_of(name, n_layer=1)
    model = model_of(name, n_layer=1, activation_checkpointing=checkpointing)
    model.compile(dynamic=False, backend="aot_eager")
    for rows in (LONG_ROWS, LONG_ROWS[::-1], ([640],) * 4):
        batch = batch_of(*rows)
        expected = gradients(plain, plain(*batch))
        for name, gradient in gradients(model, model(*batch)).items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generation_forgets_what_came_before_the_end_of_a_document(name):
    model = model_of(name).eval()
    prompt, _ = batch_of([30, 10])
    after = prompt[:, 30:]
    several = model.generate(prompt, 20, temperature=0)
    assert torch.equal(several[:, 30:], model.generate(after, 20, temperature=0))


def test_dropout_leaves_out_scores_but_keeps_documents_apart():
    model = model_of("gpt", dropout=0.5)
    model.train()
    tokens, _ = batch_of([300, 340])
    embedded = []
    model.token_embedding.register_forward_hook(
        lambda _module, _inputs, output: embedded.append(output.requires_grad_()) or output
    )
    logits = model(tokens)
    (gradient,) = torch.autograd.grad(logits[:, 300:].sum(), embedded)
    assert not gradient[:, :300].any()
    assert gradient[:, 300:].any()


def test_a_copy_of_a_model_has_documents_of_its_own():
    model = model_of("modern", activation_checkpointing=True)
    other = copy.deepcopy(model)
    tokens, targets = batch_of(*SHORT_ROWS)
    expected = model(tokens, targets)
    model(*batch_of([40], [40], [40]))
    assert torch.equal(other(tokens, targets), expected)
    assert other.positions.__self__ is not model.positions.__self__


def test_spans_join_short_neighbors_and_no_rows():
    assert joined([0, 100, 150, 192, 400, 640], 640) == [192, 208, 240]
    assert joined([0, 10, 20, 30, 40], 20) == [20, 20]
    assert joined([0, 1000], 1000) == [1000]
    assert joined([0, 190, 193], 193) == [190, 3]


def bounds_of(*rows):
    tokens, _ = batch_of(*rows)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == 0
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    return DocumentBounds(begins, places.where(begins, 0).cummax(1).values)


@pytest.mark.parametrize("seed", range(4))
def test_the_blocks_for_gpus_are_those_of_comparing_all_tokens(seed):
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(3):
        cuts = np.sort(draw.choice(np.arange(1, 640), int(draw.integers(1, 12)), replace=False))
        rows.append(np.diff([0, *cuts, 640]).tolist())
    starts = bounds_of(*rows).starts

    def visible(b, _h, query, key):
        return (key <= query) & (key >= starts[b, query])

    blocks, wanted = block_mask(starts), create_block_mask(visible, 3, None, 640, 640, device="cpu")
    assert torch.equal(blocks.to_dense(), wanted.to_dense())
    full, every = blocks.full_kv_num_blocks, wanted.full_kv_num_blocks
    # A diagonal block is never whole, and others are exactly where all tokens are visible.
    assert torch.equal(full, every)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_with_these_blocks_is_attention_within_documents():
    """Eager here; on a GPU the same function and blocks are compiled to one kernel."""
    bounds = bounds_of(LONG_ROWS[0], LONG_ROWS[2], LONG_ROWS[3])
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 640, 16, dtype=torch.float64) for _ in range(3))
    mask_of_tokens = token_mask(bounds.starts)
    blocks = block_mask(bounds.starts)
    masked = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_of_tokens)
    flexed = flex_attention(q, k, v, block_mask=blocks)
    torch.testing.assert_close(flexed, masked)
    torch.testing.assert_close(flexible(blocks, q, k, v, None), masked)
    on_cpu = attention_within(bounds, q, k, v, 0.0, None)
    torch.testing.assert_close(on_cpu, masked)


def test_with_dropout_a_mask_of_all_tokens_replaces_blocks(monkeypatch):
    bounds = bounds_of(*SHORT_ROWS)
    bounds.blocks = "of FlexAttention"
    q, k, v = (torch.empty(3, 2, 40, 8, device="meta") for _ in range(3))
    used = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, _k, _v, **settings: used.append(settings) or q,
    )
    attention_within(bounds, q, k, v, 0.1, 0.25)
    assert used[0]["attn_mask"].shape == (3, 1, 40, 40)
    assert (used[0]["dropout_p"], used[0]["scale"]) == (0.1, 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_is_one_graph_with_the_losses_of_eager(name, checkpointing):
    torch.compiler.reset()
    tokens, targets = batch_of(*LONG_ROWS)
    changes = {"activation_checkpointing": checkpointing}
    eager = model_of(name, **changes)
    expected = gradients(eager, eager(tokens, targets))
    model = model_of(name, masked=False, **changes)
    mask_documents(model, ByteTokenizer(), one_graph=True)
    whole = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    features = torch.compile(model.features, **whole)
    torch.testing.assert_close(features(tokens), eager.features(tokens))
    model.compile(**whole)
    torch.testing.assert_close(gradients(model, model(tokens, targets)), expected)


def test_without_documents_attention_is_the_models_own():
    q, k, v = (torch.randn(2, 2, 200, 8) for _ in range(3))
    actual = attention_within(None, q, k, v, 0.0, None)
    assert torch.equal(actual, causal_attention(q, k, v, 0.0))


def test_a_tokenizer_without_an_end_and_a_model_without_places_are_refused():
    class Endless(ByteTokenizer):
        end_of_text = None

    with pytest.raises(UserError, match=r"callbacks=documents needs documents, and this"):
        mask_documents(GPT(vocab_size=50, **SHAPE), Endless())
    other = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="needs attention with `attend`"):
        mask_documents(other, ByteTokenizer())


class Noting(lightning.LightningModule):
    """Notes whether its model is masked when Lightning lets it be compiled or placed."""

    def __init__(self):
        super().__init__()
        self.model = GPT(vocab_size=256, **{**SHAPE, "block_size": 8})
        self.new_model = lambda: GPT(vocab_size=256, **{**SHAPE, "block_size": 8})

    def configure_model(self):
        self.was_masked = isinstance(self.model.positions.__self__, Documents)

    def training_step(self, batch):
        return self.model(*batch)

    def validation_step(self, batch):
        return self.model(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_the_callback_masks_before_the_model_is_placed(corpora, tmp_path):
    data = Tokens(corpora("code prose"), 8, 4, seed=0, root=str(tmp_path / "data"))
    module = Noting()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        callbacks=[MaskDocuments()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    assert module.was_masked
    assert isinstance(module.new_model().positions.__self__, Documents)
