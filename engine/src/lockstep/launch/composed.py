"""The configuration of a program: Hydra composes it once, and it is frozen as plain values."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from lockstep.errors import UserError
from lockstep.launch.elsewhere import choice_here, setting_here
from lockstep.launch.signatures import signature_of
from lockstep.run.directory import RunDirectory, flat
from lockstep.settings import check

# Settings of `lockstep.main`, which need no place in the YAML files.
OURS = re.compile(r"(run_dir|run_name|resume|resume_force|trust_run_dir|verbosity|launch\.\w+)=")
# Hydra would read a number, and write 1e3 as 1000.0 and 1.10 as 1.1.
NUMBER_AS_NAME = re.compile(
    r"(run_dir|run_name|resume)=[-+]?[\d._]*\d[\d._]*(e[-+]?[\d_]+)?", re.IGNORECASE
)
# Flags of Hydra that take the next word.
WITH_VALUE = (
    *("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun"),
)
# Those and the others of Hydra, which takes a part of a name for the whole.
FLAGS = (
    *(flag for flag in WITH_VALUE if flag.startswith("--")),
    *("--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun"),
    *("--shell-completion", "--info"),
)
search_path_of_call: list[str] = []  # what Hydra lists, too; see hydra_plugins
# What composing may raise.
WHOLE = "# @package _global_"  # in a file: its settings are not below its group's name
COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError)


class Source(NamedTuple):
    """A function that Hydra configures, with the arguments of `hydra.main`."""

    function: Callable[..., Any]
    config_path: str | None
    config_name: str | None
    version_base: str | None


def as_argument(version_base: str | None) -> dict[str, Any]:
    """Return `version_base` as an argument for Hydra, which since 1.4 warns of it.

    Later versions behave as 1.3, unless an earlier behavior is asked for, which they refuse.
    """
    if version_base in (None, "1.3") and not hydra.__version__.startswith("1.3."):
        return {}
    return {"version_base": version_base}


class SweepStopped(BaseException):
    """A signal ended a job and so the sweep; not an `Exception`, which Hydra would store."""


def added(word: str) -> str:
    """Let Hydra accept a setting of `lockstep.main` that is in no YAML file."""
    return f"++{word}" if OURS.match(word) else word


def quoted(word: str) -> str:
    """Quote a value that Hydra's grammar can't read, such as the path `step=000500.ckpt`."""
    name, equals, value = word.partition("=")
    if not re.fullmatch(r"\+{0,2}[\w.@/]+", name, re.ASCII) or not equals:
        return word
    if value.startswith(("'", '"', "[", "{")):
        return word
    if not NUMBER_AS_NAME.fullmatch(word):
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            pass
        else:
            return word
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)  # backslashes before the last quote
    return f'{name}="{escaped}"'


def refuse_unseen(words: list[str]) -> None:
    """Raise a `UserError` for a word that ends with a control character, or has one in its name.

    Nobody types these, and Hydra would take them as a part of a value, or of a name. A character
    without a width in a name, such as a byte order mark, isn't seen either.
    """
    for word in words:
        name, equals, _ = word.partition("=")
        if unicodedata.category(word[-1:] or " ") == "Cc":
            unseen, place = word[-1], "ends with"
        else:
            in_name = [letter for letter in name if unicodedata.category(letter) in ("Cc", "Cf")]
            if not (equals and in_name):
                continue
            unseen, place = in_name[0], "has in its name"
        what = f"the character {unseen!r}; remove it"
        if unseen == "\r":
            what = "a carriage return, as lines of Windows do; remove it, from a whole file with: "
            what += r"tr -d '\r' < FILE > NEW_FILE"
        raise UserError(f"{word!r} {place} {what}")


def for_hydra(words: list[str]) -> list[str]:
    """Return a command line as Hydra takes it: with our settings, and `run_dir` as its own folder.

    So a run has one directory, whichever of the two names the program uses.

    Raises:
        UserError: a word has characters that nobody sees, or names another kind of run directory.
    """
    refuse_unseen(words)
    refuse_odd_words(words)
    named = [word.removeprefix("run_dir=") for word in words if word.startswith("run_dir=")]
    hydras = [f"hydra.{kind}.dir=" for kind in ("run", "sweep")]
    placed = [word for word in words if word.startswith(tuple(hydras))]
    added_words = settings_first([added(quoted(word)) for word in words])
    if not named or placed or named[-1] in ("", "null"):
        return added_words
    path = Path(named[-1].strip("'\""))
    place = quoted(f"run_dir={named[-1]}").partition("=")[2]
    if path.is_file():
        raise UserError(f"run_dir={path} is a file; name a folder, or a new path")
    is_run = (path / "config.yaml").is_file()
    if is_run and {"-m", "--multirun"} & {*words}:
        raise UserError(
            f"run_dir={path} is a run, but with --multirun, run_dir is a folder of runs; name "
            "another one"
        )
    places = [f"{setting}{place}" for setting in hydras]
    if is_run:  # what Hydra has written there stays
        places.append("hydra.output_subdir=null")
        if "resume=auto" in (word.replace('"', "").replace("'", "") for word in words):
            added_words = with_recorded(added_words, RunDirectory(path).values())
    return with_overrides(added_words, places)


def refuse_odd_words(words: list[str]) -> None:
    """Raise a `UserError` for words that Hydra or a file would take for something else."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if re.match(r"--\w", name) and not any(flag.startswith(name) for flag in FLAGS):
            if not equals and "=" not in after and not after.startswith("-"):
                value = after
            setting = name[2:].replace("-", "_")
            raise UserError(
                f"{name} is not a flag, and settings have no dashes; write "
                f"{setting}={value or 'VALUE'}"
            )
        if word == "--experimental-rerun":
            raise UserError(
                "--experimental-rerun runs whatever a file contains; use run_dir=RUN resume=auto"
            )
        if any("\udc80" <= letter <= "\udcff" for letter in word):  # bytes of another encoding
            raise UserError(
                f"{ascii(word)[1:-1]} is not ASCII, and this locale knows nothing else; run: "
                "export LC_ALL=C.UTF-8"
            )
        if value == "None":  # as programs in Python write nothing
            raise UserError(f"{word} is the text None; write {name}=null for nothing")


def with_recorded(words: list[str], recorded: dict[str, Any]) -> list[str]:
    """Let Hydra accept settings that a recorded configuration has, as if with a `++`.

    What a run has chosen may have other settings than what the YAML files choose by default.
    """
    known = {name for name, _ in flat(recorded)}
    inner = {name.rpartition(".")[0] for name in known if name.count(".") > 1}
    names = {word: word.partition("=")[0] for word in words if "=" in word}
    return [
        f"++{word}"
        if names.get(word) in known | inner or _is_unlisted(word, recorded, known)
        else word
        for word in words
    ]


def with_overrides(words: list[str], more: list[str]) -> list[str]:
    """Add overrides beside the others."""
    return settings_first([*more, *words])


def settings_first(words: list[str]) -> list[str]:
    """Return words with all settings before the flags: Hydra's parser needs one sequence."""
    settings: list[str] = []
    flags: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before in WITH_VALUE or (before == "--info" and "=" not in word)
        if is_value or word.startswith("-"):
            flags.append(word)
        else:
            settings.append(word)
    return [*settings, *flags]


def config_dirs(words: list[str]) -> list[Path]:
    """Return the folders of `--config-dir`, where more YAML files are."""
    named = [word for before, word in pairwise(words) if before in ("-cd", "--config-dir")]
    named += [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    return [Path(name).absolute() for name in named]


def call(source: Source, words: list[str], job: Callable[[DictConfig], Any]) -> None:
    """Call `job` with the composed configuration, for each job of a sweep.

    Args:
        source: the function that Hydra configures, and where its YAML files are.
        words: of the command line.
        job: its result is the job's value, which a sweeper may optimize.

    Raises:
        UserError: a word or a YAML file is wrong. Errors of the job are raised as they are.
    """
    has_started = False

    def task(config: DictConfig) -> Any:
        nonlocal has_started
        has_started = True
        return job(config)

    def compose(words: list[str]) -> None:
        with _command_line(words), contextlib.suppress(SweepStopped):
            decorate(wrapped)()

    # Hydra finds the folder, and names the job, by the file of the function.
    search_path_of_call[:] = _search_path(source)
    wrapped = functools.wraps(source.function)(task)
    options = as_argument(source.version_base)
    decorate = hydra.main(source.config_path, source.config_name, **options)
    try:
        try:
            compose(words)
        except COMPOSING:
            complete = words if has_started else with_arguments(source, words)
            if complete == words:
                raise
            compose(complete)
    except COMPOSING as error:
        if has_started or isinstance(error, UserError):
            raise  # the job's own error, not the composition's
        raise UserError(one_line(source, error, words)) from None
    except OSError as error:
        if has_started:
            raise
        reason = f"{error.strerror}: {error.filename}"
        raise UserError(f"{reason}; set another run_dir, or fix that") from None


def with_arguments(source: Source, words: list[str]) -> list[str]:
    """Let Hydra accept arguments of classes that their YAML files don't list, as if with a `+`."""
    values = composition_of_choices(source, words) or {}
    known = {name for name, _ in flat(values)}
    return [f"++{word}" if _is_unlisted(word, values, known) else word for word in words]


def refuse_misspelled(source: Source, words: list[str], values: dict[str, Any]) -> None:
    """Raise a `UserError` for a name in a chosen file that nearly is one of the main file.

    Any file may add settings that the program reads, so only near ones are refused.
    """
    content = main_file(source)
    if not content:
        return
    groups = _groups_of(source)
    known = {*content, *groups}
    typed = {word.lstrip("+").partition("=")[0].partition(".")[0] for word in words}
    for name in values:
        if name in groups and name not in content:
            _refuse_own_place(source, name)
        if name in known or name in typed:
            continue
        if "." in name:
            raise UserError(f"{name!r} in a YAML file is one name with a dot in it; nest it")
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise UserError(f"unknown setting {name}; did you mean {near[0]}?")


def _refuse_own_place(source: Source, group: str) -> None:
    """Raise a `UserError` if a choice's settings are in a place that the program never reads.

    Files of a group such as `experiment` change settings of others, and say so in their first line.
    Without it, Hydra puts a file's settings below the group's name.
    """
    paths = [path for folder in folders_of(source) for path in (folder / group).glob("*.yaml")]
    texts = [path.read_text("utf-8") for path in paths]
    whole = [text for text in texts if WHOLE in text]
    if whole and not any(re.search(rf"^{group}:", text, re.MULTILINE) for text in whole):
        raise UserError(
            f"{group}: a chosen file of this group has no line `{WHOLE}`, so its settings change "
            "nothing; begin the file with it"
        )


def main_file(source: Source) -> dict[str, Any]:
    """Return the values in the main YAML file itself; none if there is no such file."""
    path = _folder_of(source) / f"{source.config_name}.yaml"
    if not path.is_file():
        return {}
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path), resolve=False))


def is_number(value: Any) -> bool:
    """Return whether this is a number, or true or false."""
    return isinstance(value, int | float)


def refuse_dangling(values: dict[str, Any]) -> None:
    """Raise a `UserError` for a reference to what isn't there."""
    try:
        OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}; set it") from None


def refuse_missing(values: dict[str, Any]) -> None:
    """Raise a `UserError` for a setting that the YAML files leave to the user, and that is open."""
    missing = [name for name, value in flat(values) if value == "???"]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be set, as in {missing[0]}=VALUE")


def refuse_other_kinds(source: Source, words: list[str], values: dict[str, Any]) -> None:
    """Raise a `UserError` for a value of another kind than the one in the YAML files.

    Only values of the first level, and of `launch`: the signatures of classes know more of the
    others.

    Args:
        source: what Hydra configures.
        words: of the command line.
        values: that they have composed.
    """
    usual = composition_of_choices(source, words) or {}
    plain = {name: value for name, value in main_file(source).items() if value != "???"}
    for name, value in values.items():
        default = plain[name] if is_number(plain.get(name)) else usual.get(name)
        _refuse_other_kind(name, value, default)
        if isinstance(default, dict) and isinstance(value, dict):
            for inner, node in value.items():
                _refuse_no_node(f"{name}.{inner}", node, default.get(inner))
        if name == "launch" and isinstance(default, dict) and isinstance(value, dict):
            for inner, number in value.items():
                _refuse_other_kind(f"{name}.{inner}", number, default.get(inner), is_inner=True)


def _refuse_other_kind(name: str, value: Any, default: Any, *, is_inner: bool = False) -> None:
    is_large = isinstance(value, int) and abs(value) >= 2**63  # more than torch's integers have
    check(name, value, not is_large, f"must be at most {2**63 - 1}")
    if value is None or default is None or type(value) is type(default) or default == "???":
        return
    if isinstance(value, str) and "${" in value:
        return
    if isinstance(default, bool):
        check(name, value, isinstance(value, bool), "must be true or false")
    elif isinstance(default, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = isinstance(default, int) and not is_inner
        check(name, value, not is_whole, "must be a whole number")
        check(name, value, is_number, "must be a number")
    _refuse_no_node(name, value, default)


def _refuse_no_node(name: str, value: Any, default: Any) -> None:
    """Raise a `UserError` for a value in the place of a group or a node."""
    if value is None or not isinstance(default, dict) or "${" in str(value):
        return
    check(name, value, isinstance(value, dict), f"is a group; set {name}.NAME, or null")


def choices_among(source: Source, words: list[str]) -> list[str]:
    """Return the words that choose a file of a group, or a class, and where files are."""
    more = config_dirs(words)
    folders = [*folders_of(source), *more]
    added = [*(f"file://{folder}" for folder in more), *_search_path(source)]
    places = ",".join(f"'{place}'" for place in added)
    chosen = [f"hydra.searchpath=[{places}]"]
    for word in words:
        name = re.split("[=@]", word)[0].lstrip("+")
        is_group = "=" in word and name and any((folder / name).is_dir() for folder in folders)
        if is_group or (name.endswith("._target_") and not word.startswith("-")):
            chosen.append(word)
    return chosen if more else chosen[1:]


def _is_unlisted(word: str, values: dict[str, Any], known: Collection[str]) -> bool:
    """Return whether a word sets an argument that a class has, but that its node lacks."""
    name, equals, _ = word.partition("=")
    parent, dot, argument = name.rpartition(".")
    if not equals or not dot or name in known or not re.fullmatch(r"[\w.]+", name):
        return False
    node: Any = values
    for part in parent.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    target = node.get("_target_") if isinstance(node, dict) else None
    signature = signature_of(target) if isinstance(target, str) else None
    return signature is not None and argument in signature.named


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Pass Hydra the words, and make it raise its errors instead of printing them."""
    name = "HYDRA_FULL_ERROR"
    words_before = sys.argv
    value_before = os.environ.get(name)
    hydra_before = GlobalHydra.instance().hydra  # a notebook may have called `hydra.initialize`
    GlobalHydra.instance().clear()
    sys.argv = [sys.argv[0], *words]
    os.environ[name] = "1"
    try:
        yield
    finally:
        sys.argv = words_before
        GlobalHydra.instance().hydra = hydra_before
        del os.environ[name]
        if value_before is not None:
            os.environ[name] = value_before


def one_line(source: Source, error: Exception, words: list[str]) -> str:
    """Return what is wrong with a command line or a YAML file, in one line."""
    text = " ".join(str(error).partition("\n\n")[0].split())
    if isinstance(error, OverrideParseException):
        text = re.sub(r"^Error when parsing index: \d+, string: .*?\]\. ", "", text)  # Hydra 1.4
        quotes = """to set a text, quote it for Hydra and for the shell: 'NAME="TEXT"'"""
        return f"{error.override}: {text}; {quotes}"
    if isinstance(error, MissingConfigException):
        return _unknown_choice(source, error) or text
    for word in choices_among(source, words):
        name, _, value = word.partition("=")
        if re.fullmatch(r"[\d.]+|null|true|false", value) and text.startswith("Config group"):
            return _no_choice(source, name, value, _choices_of(source, name))
    cause: Any = error.__cause__ or error.__context__ or error
    if not isinstance(cause, OmegaConfBaseException):
        cause = error
    path = getattr(cause, "full_key", None)
    if path and isinstance(cause, ConfigKeyError | ConfigAttributeError):
        typed = [word.lstrip("+~").partition("=")[0] for word in words]
        name = next((name for name in typed if name == path or name.startswith(f"{path}.")), path)
        return f"unknown setting {name}{_nearest_setting(source, name, words)}"
    return text


def _choices_of(source: Source, group: str) -> list[str]:
    files = [path for folder in folders_of(source) for path in (folder / group).glob("*.yaml")]
    return sorted({path.stem for path in files})


def _groups_of(source: Source) -> list[str]:
    folders = [folder for folder in folders_of(source) if folder.is_dir()]
    paths = [path for folder in folders for path in folder.iterdir()]
    return [path.name for path in paths if path.is_dir() and not path.name.startswith("_")]


def _unknown_choice(source: Source, error: MissingConfigException) -> str | None:
    """Return that a group has no such choice, and which it has; None for another file."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or []) or _choices_of(source, group)
    if not group or not options:
        return None
    return _no_choice(source, group, choice, options)


def _no_choice(source: Source, group: str, choice: str, options: list[str]) -> str:
    """Return that a group has no such choice, and which it has."""
    groups = [name for name in _groups_of(source) if name != group]
    others = [f"{name}={each}" for name in groups for each in _choices_of(source, name)]
    near = get_close_matches(choice, options, n=1)
    advice = choice_here(group, choice, options, others)
    if advice is None and near:
        advice = f"did you mean {near[0]}?"
    hint = f"; {advice}" if advice else ""
    return f"{group}={choice} is not one of {', '.join(options)}{hint}"


def _nearest_setting(source: Source, name: str, words: list[str]) -> str:
    """Return the end of a line that suggests the nearest setting, of what all others compose."""
    values = composition_of_choices(source, words)
    if values is None:
        return ""
    known = [
        *_groups_of(source),
        *(setting for setting, _ in flat(values)),
        *_arguments_beside(name, values),
    ]
    choices = _choices_with(source, name, words)
    if choices:
        return f"; choose {' or '.join(choices)}, which has it"
    all_choices = [
        f"{group}={each}" for group in _groups_of(source) for each in _choices_of(source, group)
    ]
    advice = setting_here(name, [*known, *all_choices])
    if advice is not None:
        return f"; {advice}"
    last = name.rpartition(".")[2]
    same = [setting for setting in known if setting.rpartition(".")[2] == last]
    if last in known:  # of the first level
        same = [last]
    near = get_close_matches(name, same, n=1) or (same if len(same) == 1 else [])
    near = near or get_close_matches(name, known, n=1, cutoff=0.75)
    kind = "hydra" if name.startswith("hydra.") else "job"
    hint = f"; did you mean {near[0]}?" if near else f"; --cfg {kind} shows all of them;"
    return f"{hint} (+{name}=... would add it)"


def _choices_with(source: Source, name: str, words: list[str]) -> list[str]:
    """Return the choices of a setting's group, such as `data=text`, which have that setting."""
    group, dot, _ = name.partition(".")
    if not dot or group not in _groups_of(source):
        return []
    others = [word for word in choices_among(source, words) if not word.startswith(f"{group}=")]
    choices = [f"{group}={choice}" for choice in _choices_of(source, group)]
    values = [composition(source, [*others, choice]) or {} for choice in choices]
    return [
        choice
        for choice, of_choice in zip(choices, values, strict=True)
        if name in {setting for setting, _ in flat(of_choice)}
    ]


def set_by(source: Source, words: list[str], choices: Mapping[str, Any], name: str) -> str | None:
    """Return the choice that sets a setting of another group, as `experiment=smoke`; None: none.

    Args:
        source: what Hydra configures.
        words: of the command line.
        choices: a group -> what was chosen.
        name: of the setting.
    """
    folders = [*config_dirs(words), *folders_of(source)]
    for group, choice in choices.items():
        files = [folder / group / f"{choice}.yaml" for folder in folders]
        for file in [file for file in files if file.is_file()][:1]:
            content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))
            if name in {setting for setting, _ in flat(content)}:
                return f"{group}={choice}"
            for entry in content.get("defaults", []):
                inner = isinstance(entry, str) and set_by(source, words, {group: entry}, name)
                if inner:
                    return f"{group}={choice}"
    return None


def _arguments_beside(name: str, values: dict[str, Any]) -> list[str]:
    """Return the arguments of the class whose argument a wrong name seems to be."""
    parent = name.rpartition(".")[0]
    node = OmegaConf.select(OmegaConf.create(values), parent) if parent else None
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    signature = signature_of(target) if isinstance(target, str) else None
    return [f"{parent}.{argument}" for argument in (signature.named if signature else ())]


def composition_of_choices(source: Source, words: list[str]) -> dict[str, Any] | None:
    """Return the values that the choices among these words compose; None if they don't."""
    chosen = choices_among(source, words)
    values = composition(source, chosen)
    if values is None:  # a class in the place of nothing, for example
        values = composition(source, [word for word in chosen if "_target_" not in word])
    return values


def composition(source: Source, words: list[str]) -> dict[str, Any] | None:
    """Return the values that these words compose; None if they don't."""
    return _composition(source, tuple(words))


@functools.cache
def _composition(source: Source, words: tuple[str, ...]) -> dict[str, Any] | None:
    if source.config_name is None or source.config_path is None:
        return None
    hydra_before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        options = as_argument(source.version_base)
        with hydra.initialize_config_dir(str(_folder_of(source)), **options):
            config = hydra.compose(source.config_name, [*words])
    except (*COMPOSING, OSError):  # `pkg://`, or another mistake in the words
        return None
    finally:
        GlobalHydra.instance().hydra = hydra_before
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def folders_of(source: Source) -> list[Path]:
    """Return the folders of a program's YAML files: its own, then those that its main file adds."""
    return [_folder_of(source), *filter(None, map(_place, _search_path(source)))]


def _search_path(source: Source) -> list[str]:
    """Return the `hydra.searchpath` of the main file, which only that file may set."""
    hydras = main_file(source).get("hydra")
    named = hydras.get("searchpath") if isinstance(hydras, dict) else None
    return [str(place) for place in named or ()]


def _place(address: str) -> Path | None:
    """Return the folder of an entry of `hydra.searchpath`: `pkg://package` or `file://path`."""
    kind, _, name = address.partition("://")
    if kind != "pkg":
        return Path(name or address).absolute()
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(name.replace("/", "."))
        for folder in (found and found.submodule_search_locations) or ():
            return Path(folder)
    return None


def _folder_of(source: Source) -> Path:
    return (Path(inspect.getfile(source.function)).parent / (source.config_path or "")).resolve()
