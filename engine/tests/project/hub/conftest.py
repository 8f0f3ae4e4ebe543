"""Checkpoints of tiny models with random weights, and exports of them."""

import pytest
import torch
from lockstep_gpt.export import export
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from tokenizers import ByteLevelBPETokenizer

from lockstep.checkpoints.reading import checkpoint_path, write_checkpoint
from lockstep.tokens.tokenizer import END_OF_TEXT, ByteTokenizer
from lockstep.tokens.tokenizer_choice import from_dict

STDLIB = "lockstep.tokens.sources.text.StandardLibrary"
SHAPE = {"block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 48}
MODELS = {
    "gpt": {},
    "no bias": {"bias": False},
    "modern": {"kind": ModernGPT},
    "shared keys": {"kind": ModernGPT, "n_kv_head": 2},
    "n-grams": {"kind": ModernGPT, "ngram_rows": 64, "longest_ngram": 3},
}
TEXTS = ["def f(x):\n    return x + 1\n" * 20, "naïve 漢字 😀\t" * 20]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Run tests of tiny tensors on one thread; a second core may be busy with other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def alone(tmp_path_factory):
    """Keep transformers off the network, and its copies of modeling files out of the home."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", folder)  # for programs that tests start
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        yield


@pytest.fixture(scope="session")
def learnt():
    """Return a function that trains a byte-level BPE."""

    def learn(size, texts):
        made = ByteLevelBPETokenizer()
        special = {"special_tokens": [END_OF_TEXT], "show_progress": False}
        made.train_from_iterator(texts, size, **special)
        values = {"vocab_size": made.get_vocab_size(), "end_of_text": 0, "json": made.to_str()}
        return from_dict({"kind": "bpe", **values})

    return learn


@pytest.fixture(scope="session")
def bpe(learnt):
    return learnt(400, TEXTS)


@pytest.fixture(scope="session")
def numbers():
    """Return a function that creates a tokenizer of numbers."""

    def make(size):
        return from_dict({"kind": "numbers", "vocab_size": size})

    return make


@pytest.fixture(scope="session")
def shaped():
    """Return a function that creates a model far from its initial state, so each weight counts."""

    def make(vocab_size=256, seed=0, kind=GPT, **model):
        torch.manual_seed(seed)
        arguments = {**SHAPE, **model}
        made = kind(vocab_size, **arguments).eval()
        made.arguments = arguments  # for a test that saves it
        for name, weight in made.named_parameters():
            weight.data.add_(torch.randn_like(weight) * 0.1)
            if name in ("token_embedding.weight", "output.weight"):
                weight.data[vocab_size:] = 0
        return made

    return make


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function that saves a model and tokenizer as a run does, and returns the path."""

    def save(model, tokenizer, **more):
        target = f"{type(model).__module__}.{type(model).__qualname__}"
        content = {
            "config": {
                "max_steps": 7,
                "seed": 1,
                "batch": {"global_size": 8},
                "module": {
                    "_target_": "lockstep_gpt.module.GPTModule",
                    "model": "${model}",
                },
                "model": {"_target_": target, "_partial_": True, **model.arguments},
                "data": {"source": {"_target_": STDLIB}, "root": "data"},
                "optim": {"_target_": "lockstep_gpt.optim.adamw", "lr": 0.003},
                "logger": {"wandb": {"project": "nobody's business"}},
            },
            "Tokens": {"tokenizer": tokenizer.to_dict(), "fingerprint": "0" * 8},
            "state_dict": {f"model.{name}": weight for name, weight in model.state_dict().items()},
            "global_step": 7,
            "loops": {
                "fit_loop": {"state_dict": {"combined_loader": [{"step": 7, "samples": 42}]}}
            },
            "callbacks": {"Checkpoints": {"losses": {5: 4.0, 7: 3.21987}}},
            **more,
        }
        path = checkpoint_path(tmp_path_factory.mktemp("told") / "checkpoints", 7)
        write_checkpoint(content, path)
        return path

    return save


@pytest.fixture(scope="session")
def folder_of(saved, tmp_path_factory):
    """Return a function that exports a model and returns the folder."""

    def make(model, tokenizer):
        folder = tmp_path_factory.mktemp("exported") / "folder"
        export(saved(model, tokenizer), folder)
        return folder

    return make


@pytest.fixture(scope="session", params=MODELS)
def pair(request, shaped, folder_of):
    """One of our models, and the folder of its export."""
    model = shaped(**MODELS[request.param])
    return model, folder_of(model, ByteTokenizer())
