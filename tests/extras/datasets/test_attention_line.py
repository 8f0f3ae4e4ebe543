"""The receipt names what computes attention within documents."""

import re

import pytest
import torch

from lockstep_gpt.config import Config
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.datasets.attention import PLAIN
from lockstep_gpt.extras.datasets.attention_line import attention_in_documents
from lockstep_gpt.extras.datasets.mask import mask, needs_one_graph
from lockstep_gpt.model.model_settings import ModelConfig, build_gpt


def config_of(tokens=256, device="cpu", **changes):
    compiled = changes.pop("compile", False)
    model = ModelConfig(block_size=tokens, n_layer=1, n_head=2, n_embd=16, **changes)
    return Config(max_steps=1, compile=compiled, model=model, trainer={"accelerator": device})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tokens": 64}, "plain matrix products"),
        ({"tokens": 64, "compile": True}, "plain matrix products"),
        ({"tokens": 64, "compile": True, "activation_checkpointing": True}, "flash"),
        ({"compile": True, "activation_checkpointing": True}, "flash"),
        ({"compile": True, "activation_checkpointing": True, "dropout": 0.1}, "math"),
    ],
)
def test_on_a_cpu_the_named_kernel_runs(changes, name, attention_operations):
    config = config_of(**changes)
    assert attention_in_documents(config) == name
    model = build_gpt(config.model, 300)
    mask(model, ByteTokenizer(), needs_one_graph(config))
    tokens = torch.ones(2, config.model.block_size, dtype=torch.long)
    tokens[:, 5] = ByteTokenizer().end_of_text
    with attention_operations() as ran:
        model.features(tokens)
    assert ran == ([] if name == "plain matrix products" else [name])


@pytest.mark.parametrize(("length", "kernels"), [(PLAIN, []), (PLAIN + 1, ["flash"])])
def test_long_documents_of_a_cpu_use_the_fused_kernel(length, kernels, attention_operations):
    config = config_of(PLAIN + 64)
    assert attention_in_documents(config) == "plain matrix products, flash for long documents"
    model = build_gpt(config.model, 300)
    mask(model, ByteTokenizer())
    tokens = torch.ones(1, config.model.block_size, dtype=torch.long)
    tokens[:, length - 1] = ByteTokenizer().end_of_text
    with attention_operations() as ran:
        model.features(tokens)
    assert ran == kernels


def test_gpus_use_flex_attention_without_dropout():
    assert attention_in_documents(config_of(device="cuda")) == "FlexAttention"
    assert attention_in_documents(config_of(device="mps")) == "math"


def test_the_receipt_has_the_line(command):
    out = command.train("documents.mask=true", "max_steps=1", "run_dir=run").stdout
    assert re.search(r"^  attention +plain matrix products, within documents$", out, re.MULTILINE)
