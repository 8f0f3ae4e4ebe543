import pytest
import torch
from lockstep_gpt.gpt import GPT

from lockstep.errors import RunError, UserError
from lockstep.tokens.sampling import draw_tokens

VOCAB = 50
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(VOCAB, block_size=8, n_layer=2, n_head=2, n_embd=32, dropout=0.5)
    for parameter in model.parameters():
        parameter.data.mul_(5)  # far from uniform, so choices differ
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_generator_s_seed_decides_the_text(model: GPT) -> None:
    first, again, other = (model.generate(PROMPT, 20, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_prompt_is_kept_and_may_outgrow_the_block_size(model: GPT) -> None:
    text = model.generate(PROMPT.to(torch.uint16), 20)
    assert text.shape == (2, 23)
    assert torch.equal(text[:, :3], PROMPT)
    assert text.max() < VOCAB


@torch.inference_mode()
def test_greedy_sampling_is_the_argmax_over_the_last_block(model: GPT) -> None:
    text = model.generate(PROMPT, 12, temperature=0)
    model.eval()
    for end in range(3, 15):
        expected = model(text[:, max(0, end - 8) : end])[:, -1].argmax(-1)
        assert torch.equal(text[:, end], expected)


def test_top_1_is_greedy_and_more_than_the_vocabulary_is_all_of_it(model: GPT) -> None:
    greedy = model.generate(PROMPT, 9, temperature=0)
    assert torch.equal(model.generate(PROMPT, 9, top_k=1), greedy)
    free = model.generate(PROMPT, 9, generator=seeded(3))
    assert torch.equal(model.generate(PROMPT, 9, top_k=999, generator=seeded(3)), free)


def test_top_k_draws_only_from_the_likeliest(model: GPT) -> None:
    allowed = model.eval()(PROMPT)[:, -1].topk(4).indices
    drawn = model.generate(PROMPT.repeat(50, 1), 1, temperature=3.0, top_k=4)[:, -1:]
    assert (drawn == allowed.repeat(50, 1)).any(dim=1).all()


def test_frequencies_follow_the_softmax_at_the_temperature(model: GPT) -> None:
    prompt = PROMPT[:1]
    expected = (model.eval()(prompt)[0, -1] / 2).softmax(-1)
    drawn = model.generate(prompt.expand(5_000, 3), 1, temperature=2.0, generator=seeded(0))
    counts = drawn[:, -1].bincount(minlength=VOCAB) / 5_000
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.03)


def test_generating_leaves_the_mode_and_the_weights_trainable(model: GPT) -> None:
    model.generate(PROMPT, 2)
    assert model.training
    model(PROMPT, PROMPT).backward()


@pytest.mark.parametrize(("few", "threads"), [(1 << 30, 1), (0, 2)], ids=["small", "large"])
def test_a_small_model_generates_on_one_thread(model: GPT, monkeypatch, few, threads) -> None:
    seen, features = [], model.features
    monkeypatch.setattr("lockstep.tokens.sampling.FEW_OPERATIONS", few)
    monkeypatch.setattr(
        model, "features", lambda tokens: seen.append(torch.get_num_threads()) or features(tokens)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model.generate(PROMPT, 3)
        assert seen == [threads] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_that_of_multinomial_with_the_same_seed(dtype: torch.dtype) -> None:
    logits = torch.randn(16, 5_000, dtype=dtype, generator=seeded(0)) * 3
    logits = logits.masked_fill(logits < 0, -torch.inf)  # as for `top_k`
    for seed in range(40):
        theirs = torch.multinomial(logits.softmax(-1), 1, generator=seeded(seed))
        assert torch.equal(draw_tokens(logits.softmax(-1), seeded(seed)), theirs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_of_a_gpu_waits_once_for_all_tokens(model: GPT, temperature: float) -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        model.generate(PROMPT, 20, temperature, top_k=9)
    waits = [event for event in profile.events() if event.name == "aten::_local_scalar_dense"]
    assert len(waits) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_raise(model: GPT, value: float, temperature: float) -> None:
    model.head.data[0] = value
    with pytest.raises(RunError, match="infinite or not numbers"):
        model.generate(PROMPT, 3, temperature)


def test_a_very_low_temperature_picks_the_likeliest_token(model: GPT) -> None:
    cold = model.generate(PROMPT, 9, temperature=1e-300)
    assert torch.equal(cold, model.generate(PROMPT, 9, temperature=0))


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (PROMPT[:, :0], {}, "prompt is empty"),
        (PROMPT, {"temperature": -1.0}, "temperature=-1.0"),
        (PROMPT, {"temperature": float("nan")}, "temperature=nan"),
        (PROMPT, {"top_k": 0}, "top_k=0"),
    ],
)
def test_invalid_sampling_arguments_are_rejected(
    model: GPT, prompt: torch.Tensor, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        model.generate(prompt, 1, **settings)
