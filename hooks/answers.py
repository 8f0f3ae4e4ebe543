"""Checks the answers to the template's questions: each rule once, each error in one line."""

from __future__ import annotations

import builtins
import contextlib
import keyword
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause", "none")
LONGEST = 24  # characters of package and slug; longer ones make lines of code too long
ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"
SYSTEM = ROOT / "hooks" / "commands.txt"  # of the system and its shells
# Modules and commands of dependencies whose names differ from their distribution's.
MODULES = re.compile(
    "absl|antlr4|attr|coreweave_evaluations|databricks|dateutil|dotenv|fabric|functorch|"
    "git|google|grpc|hydra|hydra_plugins|ipykernel_launcher|isympy|jupyter|libfuturize|"
    "libpasteurize|lightning_fabric|lockstep|markdown_it|mlflow|mpl_toolkits|multipart|mypyc|"
    "opentelemetry|past|pil|pip|pkg_resources|py|pydevd_plugins|pylab|slugify|torchgen|"
    "uv|websocket|wheel|xdist|yaml|zmq"
)
# Modules of Python's own library. `sys.stdlib_module_names` lacks its tests, and modules that were
# added after the oldest supported version.
LIBRARY = {*sys.stdlib_module_names, "annotationlib", "compression", "profiling", "test"}
COMMANDS = re.compile(
    "accelerate-[a-z-]+|activate|cffi-gen-src|datasets-cli|debugpy-adapter|dmypy|dotenv|"
    "f2py|fabric|futurize|hf|huggingface-cli|ipython3|isympy|jupyter-[a-z-]+|mako-render|"
    "markdown-it|mlflow|mypyc|normalizer|numpy-config|pasteurize|pip3?|pyftmerge|"
    "pyftsubset|pygmentize|pygrun|python3?|slugify|sp-ruff-checks|sqlformat|stubgen|"
    "stubtest|tiny-agents|torchfrtrace|torchrun|ttx|undill|uv|wb|wsdump"
)
SOFT_KEYWORDS = {*keyword.softkwlist, "type"}  # in softkwlist since Python 3.12
# In every project.
FOLDERS = {"configs", "data", "docs", "engine", "runs", "scripts", "src", "tests"}
DEVICES = re.compile("aux|con|nul|prn|com[0-9]|lpt[0-9]")  # of Windows, never files
QUESTIONS = (
    "project_name",
    "project_slug",
    "package_name",
    "description",
    "author",
    "email",
    "license",
    "wandb_project",
    "wandb_entity",
    "git_init",
)
OPTIONAL = {"email", "wandb_entity"}
# Marks that hooks/contents.py reads in the files that it copies.
MARKS = re.compile(r"template-only(: (begin|end)\b| -->)|section of the living README:")
ATOMS = r"[\w!#$%&'*+/=?^`{|}~-]+(\.[\w!#$%&'*+/=?^`{|}~-]+)*"  # RFC 5322, 3.2.3


class Refused(Exception):  # noqa: N818 (a message to the user, not an error of ours)
    """An invalid answer: its value, the rule, the remedy."""


@dataclass(frozen=True)
class Answers:
    """The checked answers."""

    project_name: str
    project_slug: str  # the folder, the distribution, and the command
    package_name: str
    description: str
    author: str
    email: str
    license: str
    wandb_project: str
    wandb_entity: str
    git_init: bool


def checked(values: Mapping[str, Any]) -> Answers:
    """Check the answers and return them.

    Raises:
        Refused: one of them is invalid.
    """
    return Answers(**{name: check(name, values[name]) for name in QUESTIONS})


def check(name: str, value: Any) -> Any:
    """Check the answer to one question and return it.

    Raises:
        Refused: it is invalid.
    """
    if name == "git_init":
        return _is_yes(value)
    text = _line(name, value)
    if name == "project_slug":
        _check_slug(text)
    if name == "package_name":
        _check_package(text)
    if name == "email" and text and not re.fullmatch(f"{ATOMS}@{ATOMS}", text, re.ASCII):
        _refuse(name, text, "is not an email address; write name@host, or leave it empty")
    if name == "license" and text not in LICENSES:
        _refuse(name, text, f"is not one of {', '.join(LICENSES)}")
    if name in ("wandb_project", "wandb_entity"):
        if not re.fullmatch(r"[A-Za-z0-9_.-]{0,128}", text):
            _refuse(name, text, "must be letters, digits and . _ - only, 128 at most")
        if text in (".", ".."):
            _refuse(name, text, "is a folder, not a name; add a letter or a digit")
    return text


def suggested_slug(words: str) -> str:
    """Return a valid slug, from lowercase words joined by dashes."""
    return _suggested(_check_slug, "-", words)


def suggested_package(slug: str) -> str:
    """Return a valid package name, from a slug."""
    return _suggested(_check_package, "_", slug.replace("-", "_"))


def _suggested(check: Callable[[str], None], between: str, words: str) -> str:
    """Return `words`, cut between two of them if too long; if invalid, with `my` before."""
    for candidate in (words, f"my{between}{words}"):
        cut = candidate[: LONGEST + 1].rpartition(between)[0] or candidate[:LONGEST]
        name = candidate if len(candidate) <= LONGEST else cut
        with contextlib.suppress(Refused):
            check(name)
            return name
    return f"my{between}gpt"


def _line(name: str, value: Any) -> str:
    """Return `value`, unchanged, if it is one printable line: templates insert it unchanged."""
    text = str(value)
    if any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in text):
        _refuse(name, value, "must be one line without control characters")
    if not text.strip() and name not in OPTIONAL:
        _refuse(name, value, "is empty; every project needs one")
    if text != text.strip():
        _refuse(name, value, "has spaces around it; remove them")
    if MARKS.search(text):
        _refuse(name, value, "contains a mark that the template reads; write it differently")
    return text


def _check_slug(slug: str) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
        _refuse("project_slug", slug, "must be lowercase letters, digits, and single dashes")
    _check_length("project_slug", slug)
    if COMMANDS.fullmatch(slug) or _module(slug) in _dependencies():
        _refuse("project_slug", slug, "is the name of a dependency or its command; choose another")
    if slug in SYSTEM.read_text("utf-8").split():
        _refuse("project_slug", slug, "is a command of the system or a shell; choose another")


def _check_package(name: str) -> None:
    if keyword.iskeyword(name) or name in SOFT_KEYWORDS:
        _refuse("package_name", name, "is a keyword of Python; choose another name")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        _refuse(
            "package_name", name, "must be lowercase letters, digits, and _, starting with a letter"
        )
    _check_length("package_name", name)
    if hasattr(builtins, name):
        _refuse("package_name", name, "is a built-in of Python; choose another name")
    if name in LIBRARY:
        _refuse("package_name", name, "is a module of Python's own library; choose another name")
    if MODULES.fullmatch(name) or name in _dependencies():
        _refuse("package_name", name, "is a module of a dependency; choose another name")
    if name in FOLDERS:
        _refuse("package_name", name, "is a folder of every project; choose another name")
    if name in {path.stem for path in (ROOT / "scripts").rglob("*.py")}:
        _refuse("package_name", name, "is a script, which would hide it; choose another name")


def _check_length(answer: str, name: str) -> None:
    if len(name) > LONGEST:
        _refuse(answer, name, f"has {len(name)} characters; {LONGEST} are allowed")
    if DEVICES.fullmatch(name):
        _refuse(answer, name, "is the name of a device on Windows; choose another name")


def _dependencies() -> set[str]:
    """Return the modules of all pinned dependencies, if they have their distribution's name."""
    pins = re.findall(r"^([\w.-]+)==", PINS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return set(map(_module, pins))


def _module(distribution: str) -> str:
    return re.sub(r"[-_.]+", "_", distribution).lower()


def _is_yes(value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse("git_init", value, "must be yes or no")
    return value


def _refuse(name: str, value: Any, rule: str) -> NoReturn:
    raise Refused(f"{name}={value!r} {rule}")
