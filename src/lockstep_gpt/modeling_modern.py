"""The modern GPT for transformers; it needs only torch and transformers.

This file is next to the weights of an exported model, and is loaded with them by
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. It computes the same as the
trained model, without a cache of keys and values.

Letters in shapes: B samples, T tokens, C width, H heads, D = C / H, V vocabulary size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

MULTIPLIERS = (36_313, 27_191)  # in an n-gram's hash: of the preceding tokens, of a token


class ModernGPTConfig(PretrainedConfig):  # type: ignore[misc]
    """The shape of the model.

    Args:
        vocab_size: V.
        block_size: maximum T.
        n_layer: number of blocks.
        n_head: number of query heads, H.
        n_kv_head: number of key and value heads; None: `n_head`.
        n_embd: C.
        ngram_rows: rows of the n-gram table for each n; 0: no table.
        longest_ngram: the largest n.
        rotary_base: base of the rotary angles.
        attention_scale: factor on the products of queries and keys.
        others: settings of transformers itself.
    """

    model_type = "modern_gpt"
    attribute_map = {  # noqa: RUF012 (transformers declares it so)
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(
        self,
        vocab_size: int = 256,
        block_size: int = 64,
        n_layer: int = 4,
        n_head: int = 4,
        n_kv_head: int | None = None,
        n_embd: int = 128,
        ngram_rows: int = 0,
        longest_ngram: int = 2,
        rotary_base: float = 10_000.0,
        attention_scale: float = 0.25,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_kv_head = n_kv_head or n_head
        self.n_embd = n_embd
        self.ngram_rows = ngram_rows
        self.longest_ngram = longest_ngram
        self.rotary_base = rotary_base
        self.attention_scale = attention_scale
        super().__init__(**{"tie_word_embeddings": False, "use_cache": False, **others})


@dataclass
class ModernGPTOutput(CausalLMOutput):  # type: ignore[misc]
    """Also what the head multiplies, (B, T, C), because trl computes logits itself."""

    last_hidden_state: Tensor | None = None


class ModernGPTForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Rotary positions, norms without weights, squared ReLU, a part of the token before."""

    config_class = ModernGPTConfig
    base_model_prefix = ""

    def __init__(self, config: ModernGPTConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        if config.ngram_rows:
            rows = config.ngram_rows * (config.longest_ngram - 1)
            self.ngram_embedding = nn.Embedding(rows, config.n_embd)
        self.previous = nn.Parameter(torch.zeros(config.n_embd))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding, (V, C)."""
        return self.token_embedding

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, (V, C)."""
        return self.output

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> ModernGPTOutput:
        """Predict the token after each of `input_ids`, (B, T).

        Args:
            input_ids: at most `block_size` tokens per sample.
            attention_mask: (B, T), 0 for padding, which no other token sees.
            labels: (B, T), shifted here; the loss is the mean over labels that aren't -100.
            others: not used.

        Raises:
            ValueError: T is longer than `block_size`.
        """
        T = input_ids.shape[1]
        limit = self.config.block_size
        if limit < T:
            raise ValueError(f"{T} tokens are more than block_size={limit}; shorten the input")
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.token_embedding(input_ids)  # (B, T, C)
        if self.config.ngram_rows:
            one = code = input_ids * seen * MULTIPLIERS[1]
            rows = self.config.ngram_rows
            for n in range(2, self.config.longest_ngram + 1):
                code = F.pad(code[:, :-1], (1, 0)) * MULTIPLIERS[0] ^ one
                x = x + self.ngram_embedding(code % rows + (n - 2) * rows)
        x = norm(x)
        before = F.pad((x * seen[..., None].to(x.dtype))[:, :-1], (0, 0, 1, 0))
        x = x + self.previous * before
        cos, sin = self.rotations(T, x.device)
        mask = visible(seen.bool())
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = norm(x)
        logits = self.output(x)  # (B, T, V)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return ModernGPTOutput(loss=loss, logits=logits, last_hidden_state=x)

    def rotations(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles, each (T, 1, D / 2)."""
        width = self.config.n_embd // self.config.n_head
        speeds = self.config.rotary_base ** (-torch.arange(0, width, 2, device=device) / width)
        angles = torch.outer(torch.arange(length, device=device).float(), speeds)[:, None]
        return angles.cos(), angles.sin()


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModernGPTConfig) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Refine the residual stream `x`, (B, T, C)."""
        x = x + self.attention(norm(x), cos, sin, mask)
        refined: Tensor = x + self.mlp(norm(x))
        return refined


class CausalSelfAttention(nn.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self, config: ModernGPTConfig) -> None:
        super().__init__()
        self.width = config.n_embd // config.n_head  # D
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.scale = config.attention_scale
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.key = nn.Linear(config.n_embd, self.n_kv_head * self.width, bias=False)
        self.value = nn.Linear(config.n_embd, self.n_kv_head * self.width, bias=False)
        self.projection = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Mix `x`, (B, T, C), over what `mask`, (B, 1, T, T), lets each token see."""
        B, T, C = x.shape
        q = rotate(norm(self.query(x).view(B, T, self.n_head, self.width)), cos, sin)
        k = rotate(norm(self.key(x).view(B, T, self.n_kv_head, self.width)), cos, sin)
        v = self.value(x).view(B, T, self.n_kv_head, self.width)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, heads, T, D)
        k, v = (heads.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for heads in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        mixed: Tensor = self.projection(y.transpose(1, 2).reshape(B, T, C))
        return mixed


class MLP(nn.Module):
    """Two linear layers with squared ReLU between them, 4 C wide, for each token."""

    def __init__(self, config: ModernGPTConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.projection = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, (B, T, C), to the same shape."""
        y: Tensor = self.projection(F.relu(self.expansion(x)).square())
        return y


def norm(x: Tensor) -> Tensor:
    """Return `x` with mean 0 and variance 1 in its last dimension."""
    return F.layer_norm(x, x.shape[-1:])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of `x`, (B, T, H, D), by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    cos = cos.to(x.dtype)
    sin = sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visible(seen: Tensor) -> Tensor:
    """Return which tokens each token sees, (B, 1, T, T): itself and earlier ones, not padding.

    Padding sees itself, so that no row is empty; nothing reads its output.
    """
    T = seen.shape[1]
    everything = torch.ones(T, T, dtype=torch.bool, device=seen.device)
    itself = torch.eye(T, dtype=torch.bool, device=seen.device)
    return ((everything.tril() & seen[:, None]) | itself)[:, None]
