"""`python -m lockstep_gpt.extras.chat.docstrings FILE`: questions about the library.

Each question is the name and signature of a function or a class, its answer the first sentence of
its docstring. The modules are read, not imported.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from lockstep_gpt.data.sources.stdlib import LEFT_OUT, files_below
from lockstep_gpt.errors import UserError
from lockstep_gpt.whole_files import write_output

SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.DOTALL)
SIGNATURE = 100  # characters of a question at most
ANSWER = 160  # characters of an answer at most
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def questions() -> Iterator[tuple[str, str]]:
    """Yield name and signature, and the first sentence about it, sorted by module."""
    root = sysconfig.get_path("stdlib")
    seen = set()
    for file in sorted(files_below(root, ".py", LEFT_OUT)):
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if module.startswith("_"):
            continue
        with warnings.catch_warnings(action="ignore"):  # about the code that is read
            tree = ast.parse(Path(file.path).read_bytes())
        for name, node in _documented(tree, module):
            question = _signature(name, node)
            answer = _first_sentence(node)
            if question and answer and question not in seen:
                seen.add(question)
                yield question, answer


def _documented(parent: ast.AST, path: str) -> Iterator[tuple[str, Documented]]:
    """Yield the public functions and classes in a module or class, with their full names."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{path}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, f"{path}.{node.name}")


def _signature(name: str, node: Documented) -> str:
    """Return a question; empty if it would be too long."""
    arguments = "" if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
    question = f"{name}({arguments})"
    return question if len(question) <= SIGNATURE else ""


def _first_sentence(node: Documented) -> str:
    """Return an answer; empty if there is none, or if it would be too long."""
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    sentence = SENTENCE.match(" ".join(paragraph.split()))
    if sentence is None or len(sentence[0]) > ANSWER:
        return ""
    return sentence[0]


def main(arguments: list[str]) -> int:
    """Write the corpus to the file that is given: `{"prompt": ..., "completion": ...}` per line."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("give one file to write the questions to, such as questions.jsonl")
    pairs = [{"prompt": question, "completion": answer} for question, answer in questions()]
    lines = "".join(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in pairs)
    write_output(Path(arguments[0]), lines)
    print(f"{arguments[0]}: {len(pairs):,} questions about the standard library")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError) as error:
        sys.exit(f"docstrings: {error}")
