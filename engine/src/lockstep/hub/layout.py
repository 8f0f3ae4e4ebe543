"""Converts the names and shapes of weights between a project's models and transformers.

Letters in shapes: V vocabulary size, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UserError

Weights = dict[str, Tensor]
LONGEST = 256  # tokens that are compared; more would take minutes with a large model
TOLERANCE = 1e-3  # relative to the largest logit; rounding in float32 gives about 1e-5


class Model(Protocol):
    """What a language model must have for an export."""

    vocab_size: int
    block_size: int  # tokens of context

    @property
    def num_parameters(self) -> int:
        """All of them."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits, (B, T, V), of tokens, (B, T)."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights."""


@dataclass(frozen=True)
class Layout:
    """How transformers describes one architecture of a project.

    Args:
        model_type: its name there.
        about: a model -> what config.json contains in addition to the shape.
        names: setting in config.json -> attribute of the model, for the shape.
        place: name of a weight -> its name there, and whether the matrix is transposed there.
        computes: settings in config.json, other than the shape, that must be as in `about`.
        formula: tokens, (T,), content of config.json, exported weights -> the logits, (T, V), that
            transformers computes. An export whose logits differ from the model's is refused.
        written: what the formula computes, for the error.
        remedy: what to do after an edit of the model's code.
        code: the file that transformers needs to load the model; None: it knows the architecture.
        padded: weights that have more rows than the vocabulary.
        positions: the weight with a row per position; a shorter context uses the first ones.
        completed: a model and its exported weights -> all that transformers expects.
        cleaned: weights of a folder -> those that belong to a model, by their usual names.
    """

    model_type: str
    about: Callable[[Any], dict[str, Any]]
    names: Mapping[str, str]
    place: Callable[[str], tuple[str, bool]]
    computes: Collection[str]
    formula: Callable[[Tensor, dict[str, Any], Weights], Tensor]
    written: str
    remedy: str
    code: Path | None = None
    padded: Collection[str] = ()
    positions: str | None = None
    completed: Callable[[Any, Weights], Weights] = lambda _, weights: weights
    cleaned: Callable[[Mapping[str, Tensor]], Weights] = dict

    def settings(self, model: Model) -> dict[str, Any]:
        """Return the content of config.json for `model`."""
        shape = {theirs: getattr(model, ours) for theirs, ours in self.names.items()}
        known = {"model_type": self.model_type, "vocab_size": model.vocab_size, "dtype": "float32"}
        return {**known, **shape, **self.about(model)}

    @torch.inference_mode()
    def refuse_other_logits(
        self, model: Model, config: dict[str, Any], weights: Weights, why: str
    ) -> None:
        """Compare the logits of `model` for random tokens with those of its export.

        Args:
            model: the model, in evaluation mode.
            config: the content of config.json.
            weights: the exported weights.
            why: begins the message.

        Raises:
            UserError: they differ, so the model's code was edited, but not its export.
        """
        length = min(LONGEST, model.block_size)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.vocab_size, (length,), generator=generator)
        ours = model(tokens[None])[0].float()
        largest = ours.abs().max().item()
        difference = (self.formula(tokens, config, weights) - ours).abs().max().item()
        if not difference <= TOLERANCE * largest:  # also if it is not a number
            raise UserError(
                f"{why}: the export's logits differ from the model's by up to {difference:.2g}, "
                f"where the largest is {largest:.2g}; transformers would compute something else: "
                f"export writes the unedited {self.written}; {self.remedy}"
            )

    def exported(self, model: Model) -> Weights:
        """Return the weights of `model` with the names and shapes of transformers."""
        weights = {}
        for ours, padded in model.state_dict().items():
            theirs, turned = self.place(ours)
            weight = padded[: model.vocab_size] if ours in self.padded else padded
            if turned:
                weight = weight.T
            # Cloned: safetensors rejects tensors that share memory.
            weights[theirs] = weight.clone(memory_format=torch.contiguous_format)
        return self.completed(model, weights)

    def imported(self, saved: Mapping[str, Tensor], model: Model, source: str) -> Weights:
        """Return weights from transformers with our names and the shapes of `model`.

        Positions beyond the context are dropped; rows that pad the vocabulary are zero.

        Raises:
            UserError: one is missing, left over, or misshapen; the message starts with `source`.
        """
        left = self.cleaned(saved)
        weights = {}
        for ours, place in model.state_dict().items():
            theirs, turned = self.place(ours)
            if theirs not in left:
                raise UserError(f"{source} lacks the weight {theirs}; choose a complete folder")
            weight = left.pop(theirs)
            if turned:
                weight = weight.T
            if ours == self.positions:
                weight = weight[: len(place)]
            if ours in self.padded and len(weight) == model.vocab_size:
                weight = F.pad(weight, (0, 0, 0, len(place) - len(weight)))
            weights[ours] = weight
            if weights[ours].shape != place.shape:
                raise UserError(
                    f"{source} has {theirs} of shape {tuple(weight.shape)}, not "
                    f"{tuple(place.shape)}; set model.* as in its config.json"
                )
        _refuse_left_over(left, source)
        return weights


def _refuse_left_over(left: Weights, source: str) -> None:
    for name, weight in sorted(left.items(), key=lambda item: item[0].endswith(".bias")):
        if not name.endswith(".bias"):
            raise UserError(
                f"{source} has the weight {name}, which the model lacks; choose another folder"
            )
        if weight.any():
            raise UserError(f"{source} has biases, such as {name}; set model.bias=true")
