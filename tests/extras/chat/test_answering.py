"""Answers are those of `generate`, alone or with others, and come as whole characters."""

import random

import pytest
import torch

from lockstep_gpt.data.tokenizer import ByteTokenizer, NumberTokenizer
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.extras.chat.answering import CHUNK, Answer, Answering, stream
from lockstep_gpt.extras.chat.sampling import Sampling
from lockstep_gpt.extras.chat.speech import Speech
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig

GREEDY = Sampling(temperature=0)
MODERN = {"architecture": "modern", "bias": False, "ngram_rows": 64, "longest_ngram": 3}


def new_model(block_size=48, **shape):
    torch.manual_seed(0)
    model = build_gpt(
        ModelConfig(block_size=block_size, n_layer=2, n_head=2, n_embd=32, **shape), 256
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=["gpt", "modern"])
def model(request):
    return new_model(**(MODERN if request.param == "modern" else {}))


def answer_to(prompt, limit, sampling=GREEDY, *stops, ids=()):
    tokenizer = ByteTokenizer()
    speech = Speech(tokenizer, stops)
    return Answer(list(prompt), limit, speech, sampling, frozenset(ids))


def generated(model, prompt, length, sampling=GREEDY):
    source = torch.Generator().manual_seed(sampling.seed)
    settings = sampling.temperature, sampling.top_k, source
    return model.generate(torch.tensor([prompt]), length, *settings)[0, len(prompt) :].tolist()


def finish(answering):
    while answering.answers:
        answering.step()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.5, seed=7), Sampling(2.0, 9, seed=3)])
def test_an_answer_is_that_of_generate_with_the_same_seed(model, sampling):
    prompt = [*range(60, 75)]
    answer = answer_to(prompt, 33, sampling)
    text = "".join(stream(model, answer))
    assert answer.ids == generated(model, prompt, 33, sampling)
    assert text == ByteTokenizer().decode(answer.ids)
    assert answer.reason == "length"


def test_a_long_prompt_is_read_as_generate_reads_it(model):
    prompt = [random.Random(1).randrange(256) for _ in range(100)]
    with Answering(model) as answering:
        answering.add(answer := answer_to(prompt, 1))
        finish(answering)
    assert answer.ids == generated(model, prompt, 1)


def test_with_a_slide_of_one_token_the_whole_text_is_that_of_generate(model):
    prompt = [*range(60, 75)]
    with Answering(model, slide=48) as answering:
        answering.add(answer := answer_to(prompt, 90))
        finish(answering)
    assert answer.ids == generated(model, prompt, 90)


@pytest.mark.slow
@torch.inference_mode()
def test_beyond_the_context_each_token_follows_at_least_three_quarters_of_it(model):
    prompt = [*range(60, 75)]
    "".join(stream(model, answer := answer_to(prompt, 120)))
    ids = [*prompt, *answer.ids]
    for end in range(48, len(ids)):
        likeliest = {
            int(model(torch.tensor([ids[end - seen : end]]))[0, -1].argmax())
            for seen in range(36, 49)
        }
        assert ids[end] in likeliest


def test_answers_that_begin_and_end_at_different_times_do_not_change_each_other(model):
    source = random.Random(0)
    prompts = [[source.randrange(256) for _ in range(source.randrange(1, 70))] for _ in range(12)]
    limits = [source.randrange(1, 80) for _ in prompts]
    alone = []
    for prompt, limit in zip(prompts, limits, strict=True):
        alone.append(answer_to(prompt, limit))
        "".join(stream(model, alone[-1]))
    waiting = [answer_to(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    together = list(waiting)
    with Answering(model, rows=4) as answering:
        while waiting or answering.answers:
            while waiting and answering.free and source.random() < 0.7:
                answering.add(waiting.pop(0))
            answering.step()
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


def test_an_answer_that_is_taken_out_leaves_the_others_as_they_are(model):
    expected = generated(model, [70], 30)
    with Answering(model, rows=3) as answering:
        stopped, finished, long = answer_to([60], 30), answer_to([70], 30), answer_to([80] * 40, 30)
        for answer in (stopped, finished, long):
            answering.add(answer)
        answering.step()
        answering.end(stopped)
        answering.step()
        answering.end(long)
        finish(answering)
    assert finished.ids == expected


def test_answers_go_on_while_a_long_prompt_is_read():
    model = new_model(block_size=4 * CHUNK)
    with Answering(model, rows=2) as answering:
        answering.add(first := answer_to([60], 50))
        answering.step()
        answering.add(second := answer_to([61] * (3 * CHUNK + 1), 50))
        for tokens in (2, 3, 4):
            answering.step()
            assert (len(first.ids), second.ids) == (tokens, [])
        answering.step()
        assert len(second.ids) == 1


def test_a_seed_decides_and_top_p_keeps_the_likeliest(model):
    def drawn(**settings):
        return answer_ids(model, Sampling(**settings))

    assert drawn(temperature=2, seed=1) == drawn(temperature=2, seed=1) != drawn(temperature=2)
    assert (
        drawn(top_p=1e-320)
        == drawn(top_p=1e-9)
        == drawn(temperature=0)
        == drawn(top_k=1)
        == drawn(temperature=1e-300)
    )


def answer_ids(model, sampling):
    "".join(stream(model, answer := answer_to([60], 20, sampling)))
    return answer.ids


def test_top_p_draws_from_exactly_the_tokens_whose_probabilities_reach_it():
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    source = torch.Generator().manual_seed(0)
    for top_p, allowed in [(0.4, {1}), (0.6, {1, 3}), (0.9, {0, 1, 3}), (1.0, {0, 1, 2, 3})]:
        sampling = Sampling(temperature=1.0, top_p=top_p)
        assert {sampling.draw(logits, source) for _ in range(200)} == allowed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(name, value):
    with pytest.raises(UserError, match=f"^{name}="):
        Sampling(**{name: value})


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(UserError, match="the prompt is empty"):
        answer_to([], 1)


def test_logits_that_are_no_numbers_end_the_answer_with_an_error():
    model = new_model()
    model.head.data[:] = float("nan")
    with pytest.raises(RunError, match="not numbers"):
        "".join(stream(model, answer_to([60], 9)))
    assert "attend" not in vars(model.blocks[0].attention)


class OnGPU(torch.Tensor):
    """A tensor that counts how often the host waits for it, as if it were on a GPU."""

    waits = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = {torch.Tensor.cpu, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item}
        result = super().__torch_function__(func, types, args, kwargs)
        if func not in plain | {torch.Tensor.tolist}:
            return result
        OnGPU.waits += 1
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


def test_a_gpu_is_waited_for_once_per_token_of_all_answers(model, monkeypatch):
    with Answering(model, rows=16) as answering:
        for row in range(16):
            sampling = Sampling(row / 10, top_k=row or None, top_p=1 - row / 20, seed=row)
            answering.add(answer_to([60, row], 30, sampling))
        for _ in range(16):  # each reads one prompt
            answering.step()
        read = answering.cache.read
        monkeypatch.setattr(answering.cache, "read", lambda *rows: read(*rows).as_subclass(OnGPU))
        monkeypatch.setattr(OnGPU, "waits", 0)
        for _ in range(5):
            assert len(answering.step()) == 16
    assert OnGPU.waits == 5


def test_a_token_that_stops_is_not_part_of_the_answer(model):
    ids = generated(model, [60], 20)
    answer = answer_to([60], 20, GREEDY, ids=[ids[7]])
    "".join(stream(model, answer))
    assert answer.ids == ids[: ids.index(ids[7])]
    assert answer.reason == "stop"


def spoken(text, *stops, tokenizer=None):
    """Return the pieces of a text of which one byte comes after another."""
    speech = Speech(tokenizer or ByteTokenizer(), stops)
    pieces = []
    for byte in text.encode() if isinstance(text, str) else text:
        pieces.append(speech.add(byte))
        if speech.stopped:
            return pieces
    return [*pieces, speech.end()]


@pytest.mark.parametrize("text", ["größer", "aé漢😀b", "漢字", "\U0001f469\u200d\U0001f680"])
def test_text_comes_in_whole_characters(text):
    pieces = spoken(text)
    assert "".join(pieces) == text
    assert all(piece in ("", *text) for piece in pieces)


def test_words_that_a_tokenizer_joins_by_spaces_keep_them():
    assert "".join(spoken(b"\x07\x08\x09", tokenizer=NumberTokenizer(256))) == "7 8 9"


@pytest.mark.parametrize(
    "text", [b"a\x80b", b"\xf0\x9f\x92", b"\xff\xfe", b"\xe2\x82a", b"\x80" * 9]
)
def test_bytes_that_are_no_text_come_as_the_tokenizer_decodes_them(text):
    assert "".join(spoken(text)) == ByteTokenizer().decode(text)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one. two", [". "], "one"),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("no end", ["endless"], "no end"),
        ("x\n\ny", ["zz", "\n\n"], "x"),
        ("größe", ["ß"], "grö"),
        ("stop", ["stop"], ""),
        ("abcd", ["cd", "bc"], "a"),
    ],
)
def test_text_ends_before_the_first_stop_sequence(text, stops, expected):
    pieces = spoken(text, *stops)
    assert "".join(pieces) == expected
    assert all("".join(pieces[:end]) == expected[: len("".join(pieces[:end]))] for end in range(9))


def test_text_that_cannot_begin_a_stop_sequence_is_not_held_back():
    assert spoken("ab.c", "..")[:3] == ["a", "b", ""]
