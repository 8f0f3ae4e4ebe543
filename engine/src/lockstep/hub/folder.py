"""`export RUN|CHECKPOINT`: writes a folder that transformers loads."""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.reading import read_checkpoint, with_newest
from lockstep.command_line import parser_of_run
from lockstep.errors import UserError
from lockstep.file_systems import remedy
from lockstep.optional import import_optional
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.whole_files import sync

if TYPE_CHECKING:
    from lockstep.hub.layout import Layout, Model


def run_command(arguments: list[str], export: Callable[[Path, Path, bool, bool], None]) -> int:
    """Export as a command line says, and print where the folder is and how to load it.

    Args:
        arguments: of the command line.
        export: exports a checkpoint to a folder; may be told to replace an earlier export there,
            and to trust the classes that only the run's configuration names.
    """
    about = "Write a trained model as a folder that Hugging Face's transformers loads."
    parser = parser_of_run("export", about)
    to = "the folder (default: export in the run directory)"
    parser.add_argument("--to", type=Path, help=to)
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    options = parser.parse_args(arguments)

    def export_checkpoint(source: Path) -> Path:
        target: Path = options.to or _next_to(source)
        export(source, target, options.force, options.trust)
        return target

    target = with_newest(options.source, export_checkpoint)
    print(f"{target}: load it with transformers; see {target / 'README.md'}")
    return 0


def _next_to(source: Path) -> Path:
    run = source.parent.parent
    if source.parent.name != "checkpoints":
        raise UserError(f"{source} is not in a run directory; add --to FOLDER")
    return run / "export"


def write_export(
    target: Path, source: Path, model: Model, tokenizer: Tokenizer, layout: Layout
) -> None:
    """Export a model to the folder `target`, completely or not at all.

    Args:
        target: a folder that `refuse_occupied` has let pass.
        source: the checkpoint's file.
        model: built with its weights, in evaluation mode.
        tokenizer: of the model.
        layout: how transformers describes the model.

    Raises:
        UserError: transformers would compute something else, or the folder can't be written.
    """
    from lockstep.hub.card import model_card
    from lockstep.hub.tokenizer import as_files

    weights = layout.exported(model)
    settings = layout.settings(model)
    layout.refuse_other_logits(model, settings, weights, f"{source} cannot be exported")
    card = model_card(read_checkpoint(source), model, source, layout.code)
    files = {
        "config.json": {**settings, **_special(tokenizer)},
        "generation_config.json": _special(tokenizer) | _generation(layout.code),
        **as_files(tokenizer, model.block_size),
    }
    with _complete_folder(target.resolve()) as folder:  # which follows links
        for name, content in files.items():
            _write(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        _write(folder / "README.md", card)
        if layout.code:
            _write(folder / layout.code.name, layout.code.read_text(encoding="utf-8"))
        _save_weights(weights, folder / "model.safetensors")


def _special(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens that begin, end, and pad a text: the end of text, or None without one."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_text)


def _generation(code: Path | None) -> dict[str, Any]:
    return {"use_cache": False} if code else {}


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


def _save_weights(weights: dict[str, Any], path: Path) -> None:
    # Some versions of transformers reject a file without this format.
    safetensors = import_optional("export", "safetensors.torch", "hub")
    library_error = import_optional("export", "safetensors", "hub").SafetensorError
    try:
        safetensors.save_file(weights, path, {"format": "pt"})
    except library_error as error:  # on a full disk, for example
        raise OSError(errno.EIO, str(error)) from error
    with contextlib.suppress(PermissionError, NotImplementedError):  # a disk without modes
        path.chmod(path.with_name("config.json").stat().st_mode)  # the library denies others access
    with path.open("rb") as file:
        sync(file.fileno())


def refuse_occupied(target: Path, force: bool) -> None:
    """Raise a `UserError` if `target` isn't empty; `force` allows an earlier export there."""
    from lockstep.hub.card import mark

    target = target.resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    card = target / "README.md"
    if not card.is_file() or mark() not in card.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"{target} is not empty and is not an export; name another folder with --to"
        )
    if not force:
        raise UserError(
            f"{target} already contains an export; name another folder with --to, or add --force"
        )


@contextlib.contextmanager
def _complete_folder(target: Path) -> Iterator[Path]:
    """Yield a folder next to `target` to write in, and rename it to `target` once it is complete.

    Raises:
        UserError: it can't be written; `target` still has its old content.
    """
    mark = secrets.token_hex(4)
    temporary, old = (target.with_name(f".{target.name}.{mark}.{kind}") for kind in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if target.exists():
            target.rename(old)  # a folder can only replace an empty one
        temporary.rename(target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}); {remedy(error)}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)
