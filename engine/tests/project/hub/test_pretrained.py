"""`init_from`: the weights of a transformers folder, or a one-line reason why not."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from lockstep_gpt.initial_weights import load_initial_weights
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.errors import UserError
from lockstep.tokens.tokenizer import ByteTokenizer
from lockstep.tokens.tokenizer_choice import from_dict

SMOKE = {"n_layer": 2, "n_head": 2, "n_embd": 32}  # the shape of experiment=smoke


def gpt2(folder, tokenizer=None, size="5GB", **settings):
    """Save a GPT-2 from transformers; return it."""
    torch.manual_seed(1)
    vocab = tokenizer.vocab_size if tokenizer else 256
    known = {"vocab_size": vocab, "n_positions": 40, "bos_token_id": 0, "eos_token_id": 0}
    theirs = GPT2LMHeadModel(GPT2Config(**{**known, **SMOKE, **settings})).eval()
    for weight in theirs.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.1)
    theirs.save_pretrained(folder, max_shard_size=size)
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer.to_dict()["json"], encoding="utf-8")
    return theirs


def load(folder, model, tokenizer):
    """Load the weights of a folder into a model."""
    data = SimpleNamespace(tokenizer=tokenizer)
    load_initial_weights(folder, SimpleNamespace(model=model), data)


@pytest.fixture
def begun(shaped):
    """Return a function that creates a model with the weights of a folder."""

    def build(folder, tokenizer=None, **model):
        made = shaped(
            tokenizer.vocab_size if tokenizer else 256,
            seed=2,
            **{**SMOKE, "block_size": 40, **model},
        )
        load(folder, made, tokenizer or ByteTokenizer())
        return made

    return build


def test_logits_are_those_of_transformers(begun, tmp_path, bpe):
    theirs = gpt2(tmp_path, bpe)
    tokens = torch.randint(bpe.vocab_size, (2, 40))
    ours = begun(tmp_path, bpe)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert not ours.token_embedding.weight[bpe.vocab_size :].any()


def test_files_that_an_index_names_are_one_model(begun, tmp_path):
    theirs = gpt2(tmp_path, size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.randint(256, (1, 9))
    torch.testing.assert_close(begun(tmp_path)(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_half_precision_is_taken(begun, tmp_path):
    theirs = gpt2(tmp_path).bfloat16()
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(256, (1, 9))
    expected = theirs.float()(tokens).logits
    torch.testing.assert_close(begun(tmp_path)(tokens), expected, rtol=1e-5, atol=1e-5)


def test_the_first_gpt_2_s_names_and_masks_are_accepted(begun, tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = gpt2(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40) for layer in range(2)}
    head = {"lm_head.weight": bare["wte.weight"].clone()}
    save_file({**bare, **masks, **head}, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(256, (1, 9))
    torch.testing.assert_close(begun(tmp_path)(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_shorter_context_uses_the_first_positions(begun, tmp_path):
    theirs = gpt2(tmp_path)
    tokens = torch.randint(256, (1, 16))
    ours = begun(tmp_path, block_size=16)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_an_export_is_loaded_bit_for_bit(pair, shaped):
    model, folder = pair
    again = shaped(seed=3, kind=type(model), **model.arguments)
    load(folder, again, ByteTokenizer())
    tokens = torch.randint(256, (2, 32))
    assert torch.equal(again(tokens), model(tokens))
    before, after = model.state_dict(), again.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


CASES = {
    "layers": ({"n_layer": 3}, "has n_layer=2, but model.n_layer=3; set model.n_layer=2"),
    "heads": ({"n_head": 4}, "has n_head=2, but model.n_head=4; set model.n_head=2"),
    "width": ({"n_embd": 64}, "has n_embd=32, but model.n_embd=64; set model.n_embd=32"),
    "context": (
        {"block_size": 41},
        "has n_positions=40, but model.block_size=41; set model.block_size=40",
    ),
    "biases": ({"bias": False}, r"has biases, such as .+; set model.bias=true"),
}


@pytest.mark.parametrize("case", CASES)
def test_another_shape_is_rejected_by_its_setting(begun, tmp_path, case):
    gpt2(tmp_path)
    model, line = CASES[case]
    with pytest.raises(UserError, match=f"^init_from={re.escape(str(tmp_path))} {line}$"):
        begun(tmp_path, **model)


COMPUTED = {
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-6,
    "scale_attn_by_inverse_layer_idx": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_other_computations_are_rejected(begun, tmp_path, name):
    gpt2(tmp_path, **{name: COMPUTED[name]})
    with pytest.raises(UserError, match=f"has {name}=.+, but the model computes with"):
        begun(tmp_path)


def test_two_names_of_one_function_are_one(begun, tmp_path):
    gpt2(tmp_path, activation_function="gelu_pytorch_tanh")
    begun(tmp_path)


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def claims(folder, **settings):
    """Save a model of the first kind with a config.json of the second."""
    gpt2(folder, **{name: is_so for name, (is_so, _) in settings.items()})
    edited(folder, **{name: value for name, (_, value) in settings.items()})


BROKEN = {
    "another model": (
        lambda folder: edited(folder, model_type="llama"),
        "is for llama, but GPT needs gpt2; give a gpt2 folder",
    ),
    "no folder": (shutil.rmtree, r"config.json cannot be read \(No such file or directory\); name"),
    "no settings": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "lacks model.safetensors; load it with transformers and save it again",
    ),
    "half the weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 20),
        r"model.safetensors cannot be read \(.+\); copy it again",
    ),
    "wider inside": (lambda folder: gpt2(folder, n_inner=70), "c_fc.weight of shape"),
    "a layer more": (
        lambda folder: claims(folder, n_layer=(3, 2)),
        "which the model lacks; choose another folder",
    ),
    "a layer less": (
        lambda folder: claims(folder, n_layer=(1, 2)),
        "lacks the weight transformer.h.1.ln_1.weight; choose a complete folder",
    ),
    "an untied head": (
        lambda folder: claims(folder, tie_word_embeddings=(False, True)),
        "has the weight lm_head.weight, which the model lacks",
    ),
    "another vocabulary": (
        lambda folder: edited(folder, vocab_size=257),
        "has a vocabulary of 257, but the data's tokenizer has 256; set tokenizer=",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_unsuitable_folder_is_rejected_in_one_line(begun, tmp_path, case):
    gpt2(tmp_path)
    damage, line = BROKEN[case]
    damage(tmp_path)
    with pytest.raises(UserError, match=line) as refusal:
        begun(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("gpt2", "hf download openai-community/gpt2 {} --local-dir gpt2"),
        ("someone/model", "hf download someone/model {} --local-dir someone/model"),
    ],
)
def test_a_name_of_the_hub_is_answered_with_how_to_download_it(
    begun, tmp_path, monkeypatch, name, command
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        begun(name)
    assert str(refusal.value) == (
        f"init_from={name} does not exist; name a folder, or download a model of the hub: "
        + command.format('"*.json" "*.safetensors"')
    )


def test_a_tokenizer_with_other_tokens_is_rejected(begun, tmp_path, bpe):
    gpt2(tmp_path, bpe)
    values = bpe.to_dict()
    words = json.loads(values["json"])
    vocab = words["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    other = from_dict({**values, "json": json.dumps(words)})
    with pytest.raises(
        UserError, match=r"tokenizes text differently than the data; set tokenizer="
    ):
        begun(tmp_path, other)
    begun(tmp_path, bpe)  # the remedy


def test_vocabulary_and_merges_are_a_tokenizer_too(begun, tmp_path, bpe):
    gpt2(tmp_path, bpe)
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    begun(tmp_path, bpe)
    (tmp_path / "merges.txt").write_text("no pair\n" * 3)
    with pytest.raises(UserError, match=r"init_from=.* has a damaged tokenizer \("):
        begun(tmp_path, bpe)


def test_bytes_of_an_export_are_the_data_s_bytes(folder_of, shaped, bpe, numbers):
    folder = folder_of(shaped(vocab_size=bpe.vocab_size), bpe)
    load(folder, shaped(vocab_size=bpe.vocab_size), bpe)
    folder = folder_of(shaped(), ByteTokenizer())
    load(folder, shaped(), ByteTokenizer())
    load(folder, shaped(), numbers(256))  # the meaning of numbers is unknown


def weights_of(command, run, step):
    path = command.folder / run / f"checkpoints/step={step:06d}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def test_a_run_begins_with_the_weights_and_a_resumed_one_does_not_repeat_it(command, tmp_path):
    theirs = gpt2(tmp_path / "theirs")
    still = ["optim.lr=1e-12", "optim.weight_decay=0", "schedule.warmup=0"]
    words = [f"init_from={tmp_path / 'theirs'}", *still, "run_dir=runs/tuned"]
    out = command.train(*words, "max_steps=2").stdout
    assert f"weights of {tmp_path / 'theirs'}, 32 of 40 positions" in out
    first = weights_of(command, "runs/tuned", 2)
    expected = theirs.transformer.wte.weight.detach()
    torch.testing.assert_close(first["model.token_embedding.weight"][:256], expected)
    shutil.rmtree(tmp_path / "theirs")
    again = command("train", "run_dir=runs/tuned", "resume=auto", "max_steps=3").stdout
    assert "weights of" not in again
    command.train("resume=runs/tuned", "max_steps=4", *still, "run_dir=runs/onward")
    onward = weights_of(command, "runs/onward", 4)
    torch.testing.assert_close(onward["model.token_embedding.weight"][:256], expected)


@pytest.mark.slow
def test_two_ranks_start_like_one(check_two_ranks_start_like_one, tmp_path):
    gpt2(tmp_path / "theirs")
    check_two_ranks_start_like_one(tmp_path / "theirs")


def test_unsuitable_weights_fail_in_one_line_and_leave_no_run(command, tmp_path):
    gpt2(tmp_path / "theirs", n_layer=1)
    words = [f"init_from={tmp_path / 'theirs'}", "run_dir=runs/tuned"]
    done = command.train(*words, status=2)
    assert "has n_layer=1, but model.n_layer=2; set model.n_layer=1" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (command.folder / "runs/tuned").exists()
