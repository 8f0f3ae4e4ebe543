"""Adapters: the formula, what is trained and saved, and what they belong to."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_gpt.config import Config, as_values, from_container
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.data.tokenizer_choice import from_dict
from lockstep_gpt.distributed.strategies import ddp
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.conversations import Conversations
from lockstep_gpt.extras.chat.lora import AdaptedLinear, adapt
from lockstep_gpt.extras.chat.lora_settings import LoraSettings
from lockstep_gpt.extras.chat.tokenizers import chat_tokenizer
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.settings import is_module
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.optim import build_optimizer
from lockstep_gpt.training.optim_settings import OptimConfig

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
MODERN = {"architecture": "modern", "bias": False, "ngram_rows": 64, "n_kv_head": 1}
WITH_MODERN = pytest.mark.skipif(
    not is_module("model", "modern"), reason="this project was made without the extra modern"
)
MODELS = ["gpt", pytest.param("modern", marks=WITH_MODERN)]
ABSENT = "no such extra"
# Names in transformers -> ours.
PARTS = {"attn": "attention", "mlp": "mlp", "c_attn": "qkv", "c_fc": "expansion"} | {
    "c_proj": "projection"
}
TOKENS = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(5))


def adapted(model, tokenizer=None, **lora):
    """Give a model adapters if the settings of `lora` say so; return what merges them."""
    config = Config(
        max_steps=1,
        batch=BatchConfig(global_size=1),
        model=model.config,
        optim=OptimConfig(algorithm="adamw"),
        of_extras={"lora": LoraSettings(**lora)},
    )
    return adapt(model, config, tokenizer or ByteTokenizer())


def random_model(kind, seed=1):
    """Return a model with random weights."""
    torch.manual_seed(seed)
    shape = {**SHAPE, **(MODERN if kind == "modern" else {})}
    model = build_gpt(ModelConfig(**shape), 256)
    for weight in model.parameters():
        weight.data.normal_(std=0.1)
    return model


def built(kind, seed=1, **lora):
    """Return a model with random weights, and with adapters if the settings of `lora` say so."""
    model = random_model(kind, seed)
    adapted(model, **lora)
    return model


def moved(model):
    """Change everything that is trained."""
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def by_formula(ours, plain):
    """Set the weights of a plain model to W + alpha / rank * up @ down, and its marked rows."""
    layers = dict(plain.named_modules())
    for name, layer in ours.named_modules():
        if hasattr(layer, "up"):
            product = layer.up.double() @ layer.down.double()
            layers[name].weight.data += (layer.scale * product).float()
        if hasattr(layer, "rows"):
            layers[name].weight.data[0xF8:0xFC] += layer.rows
    return plain


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_logits_are_those_of_the_formula(kind, mode):
    ours = moved(built(kind, rank=4, alpha=3.0))
    plain = by_formula(ours, built(kind))
    getattr(ours, mode)()
    expected = plain(TOKENS)
    assert not torch.allclose(built(kind)(TOKENS), expected, atol=1e-3)
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_begin_without_effect(kind):
    assert torch.equal(built(kind, rank=4)(TOKENS), built(kind)(TOKENS))


@pytest.mark.parametrize("kind", MODELS)
def test_only_adapters_get_gradients_and_are_saved(kind):
    model = built(kind, rank=4)
    model(TOKENS, TOKENS).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name.rpartition(".")[2] for name in trained} == {"up", "down", "rows"}
    assert {*model.state_dict()} == trained | {"base_sha256"}
    assert sum(name.endswith(".up") for name in trained) == 2 * (4 if kind == "gpt" else 6)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("kind", MODELS)
def test_optimizers_see_only_adapters(kind, algorithm):
    if not is_module("training", algorithm) and algorithm != "adamw":
        pytest.skip("this project was made without the extra modern")
    model = built(kind, rank=4)
    settings = OptimConfig(algorithm=algorithm, weight_decay=0.1)
    optimizer = build_optimizer(model, settings, 0.01)
    seen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert seen == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    frozen = {
        n: parameter.clone()
        for n, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    assert all(
        torch.equal(parameter, model.get_parameter(name)) for name, parameter in frozen.items()
    )


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_state_gives_the_same_model_on_the_same_weights(kind):
    saved = moved(built(kind, rank=4))
    again = built(kind, rank=4)
    again.load_state_dict(saved.state_dict())
    assert torch.equal(again(TOKENS), saved(TOKENS))


def test_ddp_does_not_broadcast_buffers_in_each_step(on_ranks):
    def is_broadcast(_rank):
        settings = {"process_group_backend": "gloo", "timeout_seconds": 60, "comm_hook": "none"}
        strategy = ddp(**settings)
        strategy.parallel_devices = [torch.device("cpu")]
        return strategy._setup_model(built("gpt", rank=4)).broadcast_buffers

    assert on_ranks(1, is_broadcast) == [False]


def test_a_state_that_names_no_weights_is_refused():
    state = built("gpt", rank=4).state_dict()
    state.pop("base_sha256")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"base_sha256\""):
        built("gpt", rank=4).load_state_dict(state)


def test_a_saved_state_on_other_weights_is_refused():
    state = built("gpt", rank=4).state_dict()
    with pytest.raises(UserError, match=r"belong to other weights than model\.init_from has now"):
        built("gpt", seed=2, rank=4).load_state_dict(state)


def test_a_state_that_lacks_an_adapter_is_refused():
    state = built("gpt", rank=4).state_dict()
    del state["blocks.0.mlp.expansion.up"]
    with pytest.raises(
        RuntimeError, match=r"Missing key.+: \"blocks\.0\.mlp\.expansion\.up\"\.\s*$"
    ):
        built("gpt", rank=4).load_state_dict(state)


@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_are_a_plain_model(kind):
    model = random_model(kind)
    merge = adapted(model, rank=4)
    moved(model).eval()
    expected = model(TOKENS)
    merge()
    plain = built(kind)
    plain.load_state_dict(model.state_dict())
    assert not any(hasattr(layer, "up") or hasattr(layer, "rows") for layer in model.modules())
    torch.testing.assert_close(plain.eval()(TOKENS), expected, rtol=1e-6, atol=1e-6)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_a_rank_stays_plain():
    model = random_model("gpt")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert adapted(model) is None
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_and_merged_layers_are_ordinary_modules(kind):
    """No class is made at run time, and merged layers have the classes of a plain model."""
    model = random_model(kind)
    classes = [type(module) for module in model.modules()]
    merge = adapted(model, rank=4)
    ours = {type(module) for module in model.modules()} - {*classes}
    assert {AdaptedLinear.__name__, "EmbeddingWithRows"} <= {kind.__name__ for kind in ours}
    assert all(vars(sys.modules[kind.__module__])[kind.__name__] is kind for kind in ours)
    merge()
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("kind", MODELS)
def test_no_gradient_of_a_whole_weight_is_computed(kind):
    """Backward through a block makes no matrix of the shape of a frozen weight."""
    model = moved(built(kind, rank=4))
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    weights = {layer.weight.shape for layer in layers}
    made = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                made.add(out.shape)
            return out

    loss = model(TOKENS, TOKENS)
    with Watch():
        loss.backward()
    assert made
    assert not (weights | {shape[::-1] for shape in weights}) & made


def test_settings_of_adapters_become_plain_values_and_back():
    config = Config(
        max_steps=1,
        batch=BatchConfig(global_size=1),
        model=ModelConfig(**SHAPE),
        data=Conversations(path="a"),
        optim=OptimConfig(algorithm="adamw"),
        of_extras={"lora": LoraSettings(rank=4)},
    )
    values = as_values(config)
    assert values["lora"] == {"rank": 4, "alpha": None}
    assert LoraSettings.of(from_container(values)) == LoraSettings(rank=4)


def test_markers_of_chatml_are_trained(chatml):
    torch.manual_seed(1)
    model = build_gpt(ModelConfig(**SHAPE), chatml.vocab_size)
    adapted(model, chatml, rank=2)
    size = chatml.vocab_size
    assert model.token_embedding.tokens.tolist() == [size - 2, size - 1]


def test_special_tokens_that_were_added_are_trained(folder):
    tokenizer = chat_tokenizer(str(folder))
    torch.manual_seed(1)
    model = build_gpt(ModelConfig(**SHAPE), tokenizer.vocab_size)
    adapted(model, from_dict(tokenizer.to_dict()), rank=2)
    last = range(tokenizer.vocab_size - 4, tokenizer.vocab_size)
    assert model.token_embedding.tokens.tolist() == [*last]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_compiled_adapters_compute_the_same(kind):
    model = moved(built(kind, rank=4))
    expected = model(TOKENS, TOKENS)
    expected.backward()
    grads = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    model.compile(dynamic=False, backend="aot_eager")
    loss = model(TOKENS, TOKENS)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # by PEFT, of transformers
def test_logits_are_those_of_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    layouts = pytest.importorskip("lockstep_gpt.extras.hub.layouts", reason=ABSENT)
    ours = built("gpt", rank=4, alpha=12.0)
    plain = built("gpt")
    layout = layouts.layout_of(plain.config, "test")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**layout.settings(plain)))
    theirs.load_state_dict({**layouts.export_weights(plain, layout)}, strict=False)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        trainable_token_indices={"wte": [*range(0xF8, 0xFC)]},
    )
    with_peft = peft.get_peft_model(theirs, config).eval()
    moved(ours)
    with torch.no_grad():
        for name, layer in with_peft.named_modules():
            if not hasattr(layer, "lora_A"):
                continue
            *_, block, part, last = name.split(".")
            mine = ours.blocks[int(block)].get_submodule(f"{PARTS[part]}.{PARTS[last]}")
            layer.lora_A["default"].weight.copy_(mine.down)
            layer.lora_B["default"].weight.copy_(mine.up)
        for name, parameter in with_peft.named_parameters():
            if "token_adapter" in name and "delta" in name:
                parameter.copy_(ours.token_embedding.base[0xF8:0xFC] + ours.token_embedding.rows)
        expected = with_peft(TOKENS).logits
        torch.testing.assert_close(ours.eval()(TOKENS), expected, rtol=1e-5, atol=1e-5)
