"""GPT-2 (Radford et al. 2019). In shapes: B samples, T tokens, C width, V vocabulary size."""

import functools
import importlib
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep_gpt.errors import RunError, UserError, defined_in
from lockstep_gpt.model import functional
from lockstep_gpt.model.model_settings import VOCAB_MULTIPLE, ModelConfig
from lockstep_gpt.model.sampling import BROKEN, check_sampling, sample_tokens
from lockstep_gpt.settings import check

FEW_OPERATIONS = 1 << 30  # of a forward pass; with fewer, threads mostly wait for each other


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm, learned positions, head tied to the embedding."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.dropout = nn.Dropout(config.dropout)
        self.build()
        self.initialize()

    def build(self) -> None:
        """Create the layers."""
        config = self.config
        rule = "is only for modern models; remove it, or set model.architecture=modern"
        check("model.n_kv_head", config.n_kv_head, config.n_kv_head in (None, config.n_head), rule)
        check("model.ngram_rows", config.ngram_rows, not config.ngram_rows, rule)
        self.token_embedding = nn.Embedding(self.padded_vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = Norm(config.n_embd, bias=config.bias)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw the weights as GPT-2 does (Radford et al. 2019, section 2.3, and its code).

        Weights are normal with standard deviation 0.02. In the two layers per block that add to
        the residual stream, it is divided by sqrt(2 n_layer): the variance doesn't grow with depth.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("projection.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.ones_(parameter)  # the scale of a norm
        self.token_embedding.weight[self.vocab_size :].zero_()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the token after each of `tokens`, (B, T) of any integer type.

        Returns the logits, (B, T, V). With `targets`, (B, T), returns the mean cross-entropy in
        nats over targets that are not `IGNORE`, at least float32.

        Raises:
            UserError: T is larger than `block_size`.
        """
        features = self.features(tokens)
        if targets is None:
            return self.logits(features)
        return self.loss(features, targets)

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `features`, (B, T, C), at `targets`, (B, T), in nats."""
        return functional.linear_cross_entropy(features, self.head, self.vocab_size, targets)

    def logits(self, features: Tensor) -> Tensor:
        """Turn features, (..., C), into logits, (..., V), also outside of autocast."""
        features = features.to(self.head.dtype)
        return functional.project_to_vocabulary(features, self.head, self.vocab_size)

    @property
    def head(self) -> Tensor:
        """Weights that turn features into logits, (V padded, C): here the token embedding's."""
        return self.token_embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        """Return the head's input, (B, T, C), for `tokens`, (B, T)."""
        x = self.token_embedding(tokens.long())  # (B, T, C)
        x = self.dropout(x + self.position_embedding.weight[self.positions(tokens)])
        if self.config.residual_dtype == "bfloat16" and functional.is_narrow(x.device.type):
            x = x.bfloat16()
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)

    def positions(self, tokens: Tensor) -> Any:
        """Return the index of each token's position; a `UserError` if T exceeds `block_size`."""
        T = tokens.shape[1]
        if self.config.block_size < T:
            raise UserError(
                f"{T} tokens are more than model.block_size={self.config.block_size}; "
                "shorten the input or train with a larger block_size"
            )
        return slice(T)

    @torch.inference_mode()
    def generate(
        self,
        tokens: Tensor,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `tokens`, (B, T) with T of at least 1, by `length` tokens to (B, T + length).

        The model reads the last `block_size` tokens. `temperature` divides the logits; 0 picks the
        most likely token. `top_k` samples from the k most likely tokens, None from all. `generator`
        must be on the model's device. Raises a `UserError` if T is 0, `temperature` is negative or
        not finite, or `top_k` is below 1, and a `RunError` if logits are infinite or not numbers.
        """
        check_sampling(tokens, temperature, top_k)
        was_training = self.training
        threads = torch.get_num_threads()
        if len(tokens) * self.config.block_size * self.flops_per_token < 3 * FEW_OPERATIONS:
            torch.set_num_threads(1)
        self.eval()
        tokens = tokens.long()
        finite = torch.ones((), dtype=torch.bool, device=tokens.device)
        for _ in range(length):  # not `self(...)`, which would be recompiled for each T
            last = self.features(tokens[:, -self.config.block_size :])[:, -1]  # (B, C)
            logits = functional.project_to_vocabulary(last, self.head, self.vocab_size)
            finite &= logits.isfinite().all()
            chosen = sample_tokens(logits.float(), temperature, top_k, generator)
            tokens = torch.cat([tokens, chosen], dim=1)
        torch.set_num_threads(threads)
        self.train(was_training)
        if not finite:  # asked once: the host of a GPU waits for the answer
            raise RunError(BROKEN)
        return tokens

    @property
    def num_parameters(self) -> int:
        """Total parameters without padding rows; a tied head counts once."""
        tables = len({id(self.token_embedding.weight), id(self.head)})
        padding = tables * (self.padded_vocab_size - self.vocab_size) * self.config.n_embd
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations per token in forward and backward at T = `block_size`.

        6 per matrix weight, including the head (Kaplan et al. 2020, section 2.1), and 6 C T per
        layer for attention: half of 12 C T, because of the causal mask. PaLM's appendix B
        (Chowdhery et al. 2022) and nanoGPT count all of it, so their MFU is higher.
        """
        shape = self.config
        matrices = sum(weight.numel() for weight in self.blocks.parameters() if weight.ndim == 2)
        head = self.vocab_size * shape.n_embd
        return 6 * (matrices + head) + 6 * shape.n_layer * shape.n_embd * shape.block_size


def build_gpt(config: ModelConfig, vocab_size: int) -> GPT:
    """Build the GPT of the module that `model.architecture` names."""
    module = importlib.import_module(f"{__package__}.{config.architecture}")
    model: GPT = defined_in(module, "GPT", "model/modern.py")(config, vocab_size)
    if config.activation_checkpointing:
        # Each block keeps only its input and recomputes the rest in backward (Chen et al. 2016).
        # FSDP and torch.compile wrap the block from outside, so they see the usual class.
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


class Norm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) whose result has the type of its input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (..., C), in its last dimension."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):  # it would return float32
            weight = self.weight.to(x.dtype)
            bias = cast(Tensor | None, self.bias)
            if bias is not None:
                bias = bias.to(x.dtype)
            if x.device.type != "cpu":
                return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
            # The kernel of a CPU would add the gradients of weights over all tokens in bfloat16.
            x = F.layer_norm(x, self.normalized_shape, eps=self.eps) * weight
            return x if bias is None else x + bias


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.n_embd, bias=config.bias)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = Norm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Update the residual stream `x`, (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class CausalSelfAttention(nn.Module):
    """The only layer in which tokens see other tokens."""

    attend = staticmethod(functional.causal_attention)  # extras replace it

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.projection = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix `x`, (B, T, C), across its tokens; the shape stays the same."""
        B, T = x.shape[:2]
        qkv = self.qkv(x).view(B, T, 3, self.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, n_head, T, C / n_head)
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).flatten(2)  # concatenate the heads: (B, T, C)
        return self.projection(y)


class MLP(nn.Module):
    """Two linear layers with GELU between them, at width 4 C, for each token separately."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.projection = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, (B, T, C), to the same shape."""
        hidden = F.gelu(self.expansion(x), approximate="tanh")  # (B, T, 4 C)
        return self.projection(hidden)
