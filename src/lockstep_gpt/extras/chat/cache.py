"""A cache of keys and values: each token goes through the model once, not once per new token.

Letters in shapes: R rows of the cache, B of them read at once, T new tokens in each, L tokens that
the longest of them has afterward, H heads of keys and values, D width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep_gpt.errors import UserError
from lockstep_gpt.model.functional import project_to_vocabulary
from lockstep_gpt.model.gpt import GPT


class Cache:
    """What a model keeps of the tokens that it has read: one text in each row.

    Inside `with Cache(model) as cache:`, the model reads only new tokens: `positions`, `shifted`,
    and each attention's `attend` are replaced on the instances, and restored exactly at the end.
    Logits equal those of reading each whole text, up to rounding. Memory is allocated once, for
    `block_size` tokens per row: for each layer and token, the keys and values of its heads.

    Args:
        model: a GPT in evaluation mode.
        rows: how many texts it keeps at the same time.
    """

    def __init__(self, model: GPT, rows: int = 1) -> None:
        self.model = model
        self.rows = rows
        self.lengths = [0] * rows  # tokens that each row contains
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # (R, H, block_size, D) each
        self._before: list[Tensor] = []  # (R, ...): what `shifted` needs of each row's last token
        self._replaced: list[tuple[nn.Module, str, bool, Any]] = []  # what was replaced
        self._now = slice(0)  # the rows that are read now
        self._places: Any = slice(0)  # of the new tokens in their rows: a slice, or (B, T)
        self._length = 0  # L
        self._mask: Tensor | None = None  # (B or 1, 1, T, L); None: all tokens, or `_causal`
        self._causal = False
        self._calls = 0  # of `shifted` in this pass

    def __enter__(self) -> Cache:
        for module in self.model.modules():
            if hasattr(module, "attend"):
                self._replace(module, "attend", functools.partial(self._attend, module))
        self._replace(self.model, "positions", lambda _: self._places)
        if hasattr(self.model, "shifted"):
            self._replace(self.model, "shifted", self._shifted)
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            module, name, had, before = self._replaced.pop()
            delattr(module, name)
            if had:
                setattr(module, name, before)
        self._stored.clear()
        self._before.clear()
        self.lengths = [0] * self.rows

    def _replace(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        attributes = vars(module)
        self._replaced.append((module, name, name in attributes, attributes.get(name)))
        setattr(module, name, function)

    @torch.inference_mode()
    def read(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Append `tokens`, (B, T), to B rows from `first`; return what follows each, (B, V).

        The rows may contain texts of different lengths. A `UserError` if one would exceed
        `block_size`.
        """
        B, T = tokens.shape
        self._now = slice(first, first + B)
        lengths = self.lengths[self._now]
        self._length = max(lengths) + T
        limit = self.model.config.block_size
        if self._length > limit:
            raise UserError(
                f"{self._length} tokens are more than model.block_size={limit}; clear the row, and "
                "read fewer"
            )
        self._place(lengths, T, tokens.device)
        self._calls = 0
        last = self.model.features(tokens)[:, -1]  # (B, C)
        self.lengths[self._now] = [length + T for length in lengths]
        return project_to_vocabulary(last, self.model.head, self.model.vocab_size)

    def _place(self, lengths: list[int], T: int, device: torch.device) -> None:  # noqa: N803
        """Decide where the new tokens are and what they see."""
        same = len(set(lengths)) == 1
        self._mask = None
        self._causal = same and T > 1 and lengths[0] == 0
        self._places = slice(lengths[0], lengths[0] + T)
        if not same or (T > 1 and not self._causal):
            new = torch.arange(T, device=device)
            distinct = lengths[:1] if same else lengths
            places = torch.tensor(distinct, device=device)[:, None] + new  # (B or 1, T)
            seen = torch.arange(self._length, device=device) <= places[..., None]  # (B or 1, T, L)
            self._mask = seen[:, None]
            if not same:
                self._places = places

    def _attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        scale: float | None = None,
    ) -> Tensor:
        """Store keys and values, (B, heads, T, D); let the queries see those of their rows."""
        shared = q.shape[1] // (getattr(module, "n_kv_head", None) or q.shape[1])
        if module not in self._stored:
            shape = (self.rows, k.shape[1] // shared, self.model.config.block_size, k.shape[3])
            # Zeros, because values that no mask lets through are still multiplied by zero.
            self._stored[module] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = (stored[self._now] for stored in self._stored[module])
        if isinstance(self._places, slice):
            keys[:, :, self._places] = k[:, ::shared]
            values[:, :, self._places] = v[:, ::shared]
        else:
            rows = torch.arange(len(q), device=q.device)[:, None]
            for stored, new in ((keys, k), (values, v)):
                stored[rows, :, self._places] = new[:, ::shared].transpose(1, 2)
        settings: Any = {"is_causal": self._causal, "scale": scale, "enable_gqa": shared > 1}
        keys = keys[:, :, : self._length]
        values = values[:, :, : self._length]
        return F.scaled_dot_product_attention(q, keys, values, self._mask, dropout, **settings)

    def _shifted(self, x: Tensor) -> Tensor:
        """Return what each token's predecessor has in `x`, (B, T, ...); zeros for the first."""
        if self._calls == len(self._before):
            self._before.append(x.new_zeros((self.rows, *x.shape[2:])))
        before = self._before[self._calls][self._now]  # (B, ...), a view
        self._calls += 1
        shifted = torch.cat([before[:, None], x[:, :-1]], dim=1)
        before.copy_(x[:, -1])
        return shifted

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Empty a row for another text."""
        self.lengths[row] = 0
        for before in self._before:
            before[row].zero_()

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Replace the text of the row `target` by that of `source`, which becomes empty."""
        length = self.lengths[source]
        for stored in (part for pair in self._stored.values() for part in pair):
            stored[target, :, :length] = stored[source, :, :length]
        for stored in self._before:
            stored[target] = stored[source]
        self.lengths[target] = length
        self.clear(source)
