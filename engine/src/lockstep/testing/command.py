"""The `check` command: one experiment on several numbers of ranks, compared bit by bit."""

from __future__ import annotations

from lockstep import project
from lockstep.errors import RunError, UserError
from lockstep.launch import flags
from lockstep.settings import counted
from lockstep.testing.assertion import check
from lockstep.testing.experiment import FailedRunError

HELP = """usage: PROGRAM check [flags] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Train an experiment on several numbers of ranks, and compare all rows of metrics.csv (except
times), weights, and states of optimizers. Each run prints a hash of its weights. If something
differs, the first step, the first tensor, and the likeliest cause are shown; exit status 1.
Any Lightning script can be checked. torchrun starts it, unless lockstep.main decorates a function.
What it logged last is compared, and the weights and states at the end of Trainer.fit.

  --ranks LIST       numbers of ranks (default: 1,2,4)
  --steps N          steps of each run (default: those of the experiment)
  --tolerance X      how far values may be apart, relative to the largest one of the tensor or of
                     the column (default: bits must be equal, with batch.exact_micro_size)
  --log-tolerance X  the same for columns of metrics.csv that self.log has reduced; the sums of its
                     float32 numbers depend on the order of ranks (default: as --tolerance)
  --kill-after STEP  also kill a rank after a step, and the whole command one step later

Settings go to PROGRAM train.{defaults} To a script go all words after its path; {{ranks}} in one
of them stands for the number of ranks, as in --devices={{ranks}}.
Examples:
  PROGRAM check --kill-after 5
  PROGRAM check --tolerance 1e-11 precision=64-true"""
EXACT = "batch.exact_micro_size=2"  # of a small experiment
FLAG_OF_SETTING = {"trainer.devices": "--ranks"}


def main(arguments: list[str]) -> int:
    """Train, print a line for each run, and return 0 if the results are equal."""
    small = project.current().small
    defaults = f" By default: {' '.join([*small, EXACT])}." if small else ""
    parser = flags.Parser("check", HELP.format(defaults=defaults))
    parser.add_argument("--ranks", type=flags.counts, default=(1, 2, 4))
    parser.add_argument("--steps", type=flags.count)
    parser.add_argument("--tolerance", type=flags.above_zero)
    parser.add_argument("--log-tolerance", type=flags.above_zero)
    parser.add_argument("--kill-after", type=flags.count)
    options, overrides = parser.split(arguments)
    for word in overrides:
        if word in ("-m", "--multirun"):
            raise UserError(f"{word} starts a sweep; a check trains one experiment")
        flag = FLAG_OF_SETTING.get(word.partition("=")[0])
        if flag:
            raise UserError(f"{word} is set by the check; use {flag}")
    script = overrides[0] if overrides and overrides[0].endswith(".py") else None
    main = script or project.current().command("train")
    words = overrides[1:] if script else _with_defaults(overrides, options.tolerance)
    try:
        results = check(
            main,
            words,
            options.ranks,
            options.tolerance,
            options.kill_after,
            lambda line: print(line, flush=True),
            options.log_tolerance,
            options.steps,
        )
    except FailedRunError as failure:
        error = UserError if failure.status == UserError.status else RunError
        raise error(str(failure)) from None
    except AssertionError as difference:
        print(difference)
        return 1
    how = f"within {options.tolerance:g}" if options.tolerance else "bit for bit"
    rows = counted(len(results.rows), "row")
    print(f"equal {how}: weights, states of optimizers, {rows} of {results.log} (all but times)")
    return 0


def _with_defaults(overrides: list[str], tolerance: float | None) -> list[str]:
    """Return the overrides with those of a small experiment, unless they choose one."""
    words = project.with_small_experiment(overrides)
    is_small = len(words) > len(overrides)
    names = {word.lstrip("+").partition("=")[0] for word in overrides}
    if is_small and tolerance is None and EXACT.partition("=")[0] not in names:
        words.insert(0, EXACT)
    return words
