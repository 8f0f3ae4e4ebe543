"""`lockstep-gpt export RUN|CHECKPOINT`: writes a folder that transformers loads."""

from pathlib import Path

from lockstep.hub import refuse_occupied, run_command, write_export

from lockstep_gpt.trained_model import load_model


def main(arguments: list[str]) -> int:
    """Write the folder, and print where it is and how to load it."""
    return run_command(arguments, export)


def export(source: Path, target: Path, force: bool = False, trusted: bool = False) -> None:
    """Export the checkpoint `source` to the folder `target`, completely or not at all.

    Args:
        source: a checkpoint's file.
        target: a folder that doesn't exist yet or is empty.
        force: replace an earlier export in `target`.
        trusted: whether classes may be used that only the run's configuration names.

    Raises:
        UserError: `target` contains something else, or transformers can't load such a model or
            would compute something else.
    """
    # Late, so that mistakes are reported at once.
    from lockstep_gpt.layouts import layout_of

    refuse_occupied(target, force)
    model, _, tokenizer = load_model(source, trusted)
    write_export(target, source, model, tokenizer, layout_of(model, f"{source} cannot be exported"))
