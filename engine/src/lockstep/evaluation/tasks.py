"""Tasks of lm-eval, measured while a language model trains: by its own code, on all ranks."""

import contextlib
import io
import logging
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from lockstep.errors import UserError
from lockstep.loggers.step_rows import log_row
from lockstep.metrics.callback import log_equal, tokens_of
from lockstep.optional import import_optional, refuse_absent
from lockstep.ranks.ranks import from_each_rank
from lockstep.settings import check, check_whole
from lockstep.strategies.placing import layout_of

SEED = 1234  # of the examples in a prompt, as in lm-eval's own program
MOST_NEW = 256  # tokens of an answer, if a task doesn't say
Pair = tuple[list[int], list[int]]  # ids of a context, at least one, and of what continues it


class Tasks(Callback):
    """Measures tasks of lm-eval after each validation, with the model in training.

    It logs `tasks/NAME/METRIC`, such as `tasks/arc_easy/acc_norm`, which other callbacks may
    monitor. Ranks share the requests; the values have the same bits on any number of them, and
    training has the same bits with and without this callback.

        >>> trainer = Trainer(callbacks=[Tasks(["arc_easy"], limit=200)])

    Args:
        tasks: names of tasks, groups, or tags.
        include: a folder with YAML files of your own tasks, which are found sooner.
        limit: examples of each task, the first ones; None: all.
        batch_size: requests that a rank computes at a time.
        model: the attribute of the LightningModule that maps tokens, (B, T), to logits, (B, T, V),
            or to an object with `logits`. Position t must not see later ones.
        tokenizer: has `encode`, `decode`, and the id `end_of_text` or `eos_token_id`; None: the
            attribute `tokenizer` of the data module.
        block_size: longest T; None: the model's `block_size`, or the data's `tokens_per_sample`.

    Raises:
        UserError: an argument is out of range, or lm-eval is not installed; or, before training, a
            task can't be loaded, or the model or the tokenizer lacks something.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        include: str | None = None,
        limit: int | None = None,
        batch_size: int = 8,
        model: str = "model",
        tokenizer: Any = None,
        block_size: int | None = None,
    ) -> None:
        names = not isinstance(tasks, str) and bool(tasks)
        check("tasks", tasks, names, "is no list of names; give one, such as tasks=[arc_easy]")
        for name, value in {"limit": limit, "block_size": block_size}.items():
            if value is not None:
                check_whole(name, value, at_least=1)
        check_whole("batch_size", batch_size, at_least=1)
        refuse_absent("callbacks=tasks", "lm_eval", "tasks")
        self.tasks = [*tasks]
        self.include = include
        self.limit = limit
        self.batch_size = batch_size
        self.model = model
        self.tokenizer = tokenizer
        self.block_size = block_size
        self._loaded: Any = None  # by lm-eval

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the tasks, so that mistakes end a run before it begins."""
        if self._loaded is None:
            library = import_optional("callbacks=tasks", "lm_eval.tasks", "tasks")
            self._in_training(trainer, pl_module)
            level = logging.WARNING if trainer.is_global_zero else logging.ERROR
            logging.getLogger("lm_eval").setLevel(level)
            try:
                with isolate_rng(), silent_bars():
                    self._loaded = self._load(library)
            except Exception as error:  # the library has no error class of its own
                reason = " ".join(str(error).split())
                raise UserError(
                    f"tasks={','.join(self.tasks)}: {reason}; `lm-eval ls tasks` lists the names, "
                    "and include=FOLDER adds YAML files of yours"
                ) from error

    def _load(self, library: Any) -> Any:
        manager = library.TaskManager(include_path=self.include, include_defaults=False)
        if not {*self.tasks} <= {*manager.all_tasks}:  # the library's own take seconds to find
            manager = library.TaskManager(include_path=self.include)
        return manager.load(self.tasks)

    def _in_training(self, trainer: Trainer, pl_module: LightningModule) -> "InTraining":
        """Return the model as lm-eval sees it; a `UserError` if something is missing."""
        try:
            model = attrgetter(self.model)(pl_module)
        except AttributeError as error:
            raise UserError(f"Tasks: {error}; set model= to the module's attribute") from None
        data = getattr(trainer, "datamodule", None)
        tokenizer = self.tokenizer or getattr(data, "tokenizer", None)
        ends = [getattr(tokenizer, name, None) for name in ("end_of_text", "eos_token_id")]
        end = next((each for each in ends if each is not None), None)
        if end is None:
            raise UserError("Tasks needs a tokenizer of text, with an end; set tokenizer= to one")
        longest = self.block_size or getattr(model, "block_size", None) or tokens_of(trainer)
        if longest is None:
            raise UserError("Tasks needs to know the model's longest context; set block_size=")
        return InTraining(model, tokenizer, end, longest, self.batch_size, trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and log; every rank must call this."""
        if trainer.sanity_checking:
            return
        row = self._measure(trainer, pl_module)
        is_fit = trainer.state.fn == "fit"
        log_equal(pl_module, row, logger=not is_fit and bool(trainer.loggers))
        if is_fit:  # with all digits
            log_row(trainer.loggers, row, trainer.global_step)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return the value of each metric, the same on all ranks; every rank must call this."""
        library = import_optional("callbacks=tasks", "lm_eval.evaluator", "tasks")
        model = self._in_training(trainer, pl_module)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(SEED)
        # A compiled model would be compiled again for each length of a batch.
        eager = torch.compiler.set_stance("force_eager")
        with isolate_rng(), silent_bars(), eager, trainer.precision_plugin.forward_context():
            found = library.evaluate(
                model, self._loaded, limit=self.limit, bootstrap_iters=0, log_samples=False
            )
        row = {}
        for task, values in found["results"].items():
            for key, value in values.items():
                metric, _, chosen = key.partition(",")  # and which part of the answers
                if chosen and isinstance(value, float) and not metric.endswith("_stderr"):
                    label = metric if chosen == "none" else key
                    row[f"tasks/{task}/{label}"] = value
        return row


class InTraining:
    """A model in training, with the methods of lm-eval's `LM`.

    Each rank gets all requests and returns all results. Between them, ranks share the batches,
    whose content does not depend on the number of ranks.
    """

    rank, world_size = 0, 1  # as lm-eval sees it

    def __init__(
        self, model: Any, tokenizer: Any, end: int, longest: int, batch_size: int, trainer: Trainer
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end = end
        self.longest = longest
        self.batch_size = batch_size
        self.device = trainer.strategy.root_device
        self.has_replicas = layout_of(trainer.strategy).has_replicas
        parts = getattr(trainer.strategy, "tensor_parallel", 1)  # neighbors, with the same batches
        self.place = trainer.global_rank // parts
        self.places = trainer.world_size // parts

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood, in nats, of each continuation, and whether it is greedy."""
        return self._scores([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-likelihood, in nats, of each text, in windows that follow each other."""
        library = import_optional("callbacks=tasks", "lm_eval.utils", "tasks")
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = self._encode(request.args[0])
            for window in library.get_rolling_token_windows(ids, self.end, self.longest, 1):
                pairs.append(library.make_disjoint_window(window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._scores(pairs), strict=True):
            totals[number] += score
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the likeliest continuation of each context, token by token, up to a stop."""
        # Ranks with parts of the model must compute the same number of tokens.
        place, places = (self.place, self.places) if self.has_replicas else (0, 1)
        numbers = range(place, len(requests), places)
        own = {number: self._continued(*requests[number].args) for number in numbers}
        return in_order(own)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    def _pair(self, context: str, continuation: str) -> Pair:
        """Return ids whose border is where it is in a text: spaces belong to the next word."""
        words = context.rstrip()
        if not words:
            return [self.end], self._encode(context + continuation)
        before = self._encode(words)
        return before, self._encode(context + continuation)[len(before) :]

    def _scores(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation and whether it is greedy."""
        order = sorted(range(len(pairs)), key=lambda at: -sum(map(len, pairs[at])))
        size = self.batch_size
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        own: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(batches), self.places):
            # All ranks compute at the same times, which parts of a model need.
            batch = batches[min(first + self.place, len(batches) - 1)]
            own.update(zip(batch, self._of_batch([pairs[at] for at in batch]), strict=True))
        return in_order(own)

    def _of_batch(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        texts = []
        for context, continuation in pairs:
            if len(continuation) > self.longest:
                raise UserError(
                    f"a task's answer has {len(continuation)} tokens, more than the model's "
                    f"longest context, {self.longest}; leave the task out"
                )
            texts.append([*context, *continuation][-self.longest - 1 :])  # the latest fit
        logits = self._logits([text[:-1] for text in texts])
        found = []
        for row, (text, (_, continuation)) in enumerate(zip(texts, pairs, strict=True)):
            end, count = len(text) - 1, len(continuation)
            ours = logits[row, end - count : end].float()  # (count, V)
            ids = torch.tensor(continuation, device=self.device, dtype=torch.long)
            score = ours.log_softmax(dim=-1).gather(1, ids[:, None]).sum()
            found.append(torch.stack([score, (ours.argmax(dim=-1) == ids).all().float()]))
        return [(score, bool(greedy)) for score, greedy in torch.stack(found).tolist()]

    def _logits(self, texts: list[list[int]]) -> torch.Tensor:
        """Return logits, (B, T, V), of ids; no position sees the padding after it."""
        longest = max(map(len, texts))
        padded = [[*text, *[self.end] * (longest - len(text))] for text in texts]
        found = self.model(torch.tensor(padded, device=self.device))
        logits: torch.Tensor = getattr(found, "logits", found)
        return logits

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or settings.get("temperature"):
            raise UserError("Tasks draws no random answers; set do_sample: false in the task")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        most = min(settings.get("max_gen_toks", MOST_NEW), self.longest)
        ids = (self._encode(context) or [self.end])[-max(1, self.longest - most) :]
        new: list[int] = []
        text = ""
        while len(new) < most and not any(stop in text for stop in stops):
            logits = self._logits([[*ids, *new][-self.longest :]])
            token = int(logits[0, -1].argmax())
            if token == self.end:
                break
            new.append(token)
            text = str(self.tokenizer.decode(new))
        return text[: min((text.index(stop) for stop in stops if stop in text), default=None)]


def silent_bars() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the library's bars, one per task and rank, aren't shown."""
    return contextlib.redirect_stderr(io.StringIO())


def in_order(own: dict[int, Any]) -> list[Any]:
    """Return what all ranks have found, by its number; every rank must call this."""
    found: dict[int, Any] = {}
    for each in from_each_rank(own):
        found |= each
    return [found[number] for number in range(len(found))]
