"""Reading through the cache equals reading everything again, and is many times as fast."""

import time

import pytest
import torch

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.cache import Cache
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig

VOCAB = 50
MODELS = {
    "gpt": {"n_head": 4},
    "modern": {"architecture": "modern", "bias": False, "n_head": 4},
    "shared": {"architecture": "modern", "bias": False, "n_head": 4, "n_kv_head": 2},
    "ngrams": {
        "architecture": "modern",
        "bias": False,
        "n_head": 4,
        "ngram_rows": 64,
        "longest_ngram": 4,
    },
}
SPEEDUP = 5  # at least, at T = 1024


def new_model(kind, block_size=24, n_layer=2, n_embd=32):
    torch.manual_seed(0)
    shape = {"block_size": block_size, "n_layer": n_layer, "n_embd": n_embd}
    model = build_gpt(ModelConfig(**shape, **MODELS[kind], dropout=0.5), VOCAB).eval()
    for parameter in model.parameters():  # many begin at zero, where nothing could differ
        parameter.data.normal_(std=0.3)
    return model


@pytest.fixture(params=MODELS)
def model(request):
    return new_model(request.param)


def texts(*shape):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


def check_close(cached, uncached):
    torch.testing.assert_close(cached, uncached, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[24], [1] * 24, [1, 7, 1, 1, 10, 4], [23, 1]])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_equal_those_of_the_whole_text_however_it_is_cut(model, sizes, rows):
    tokens = texts(rows, 24)
    uncached, end = model(tokens), 0
    with Cache(model, rows) as cache:
        for size in sizes:
            logits = cache.read(tokens[:, end : end + size])
            end += size
            check_close(logits, uncached[:, end - 1])
    assert end == 24


@torch.inference_mode()
def test_rows_of_different_lengths_grow_together(model):
    tokens, lengths = texts(4, 24), [1, 13, 5, 5]
    uncached = model(tokens)
    with Cache(model, rows=4) as cache:
        for row, length in enumerate(lengths):
            logits = cache.read(tokens[row : row + 1, :length], row)
            check_close(logits[0], uncached[row, length - 1])
        for _ in range(3):
            starts = list(cache.lengths)
            new = [tokens[row, starts[row] : starts[row] + 3] for row in range(4)]
            logits = cache.read(torch.stack(new))
            check_close(logits, torch.stack([uncached[row, starts[row] + 2] for row in range(4)]))
    assert starts == [7, 19, 11, 11]


@torch.inference_mode()
def test_a_row_that_is_cleared_or_moved_has_nothing_of_its_former_text(model):
    tokens = texts(3, 20)
    uncached = model(tokens)
    with Cache(model, rows=2) as cache:
        cache.read(tokens[:2])
        cache.clear(0)
        cache.read(tokens[2:, :9])
        cache.move(1, 0)
        assert cache.lengths == [20, 0]
        cache.clear(0)
        check_close(cache.read(tokens[2:, :6], first=1), uncached[2:, 5])
        cache.move(1, 0)
        check_close(cache.read(tokens[2:, 6:9]), uncached[2:, 8])


def test_the_model_is_exactly_as_before_afterward_also_after_an_error(model):
    def attributes():
        return [dict(vars(module)) for module in model.modules()]

    first = next(module for module in model.modules() if hasattr(module, "attend"))
    first.attend = lambda *_: torch.zeros(2, 4, 9, 8)  # as another extra would
    before, tokens = attributes(), texts(2, 9)
    expected = model(tokens)
    with Cache(model) as cache, pytest.raises(UserError, match="25 tokens are more than model"):
        cache.read(texts(1, 25))
    with Cache(model):
        assert attributes() != before
    assert attributes() == before
    assert torch.equal(model(tokens), expected)


def test_its_memory_does_not_grow_with_the_text(model):
    def stored(cache):
        return sum(tensor.nbytes for pair in cache._stored.values() for tensor in pair)

    with Cache(model, rows=2) as cache:
        cache.read(texts(2, 1))
        first = stored(cache)
        cache.read(texts(2, 23))
        assert stored(cache) == first
    heads = model.config.n_kv_head or model.config.n_head
    per_token = model.config.n_layer * 2 * heads * 8 * 4  # layers, keys and values, heads, D, bytes
    assert first == 2 * 24 * per_token


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "modern"])
def test_it_is_many_times_as_fast_at_1024_tokens(kind):
    model, prompt = new_model(kind, block_size=1024, n_layer=4, n_embd=128), texts(1, 1000)

    def cached():
        with Cache(model) as cache:
            tokens = prompt
            for _ in range(24):
                drawn = cache.read(tokens).argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, drawn], dim=1)[:, -1:]
                yield int(drawn)

    def usual():
        return model.generate(prompt, 24, temperature=0)[0, 1000:].tolist()

    def seconds_of(answer):
        started = time.process_time()
        tokens = [*answer()]
        return time.process_time() - started, tokens

    ratios = []
    while len(ratios) < 4 and max(ratios, default=0) <= SPEEDUP:  # busy cores share their caches
        with_cache, tokens = seconds_of(cached)
        without, expected = seconds_of(usual)
        assert tokens == expected
        ratios.append(without / with_cache)
    assert max(ratios) > SPEEDUP
