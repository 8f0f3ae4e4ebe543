"""Make a project without cookiecutter and without questions; `scripts/dev.py update` calls this.

usage: python hooks/generate.py RECORD TARGET

RECORD is a project's .template.json; TARGET is a folder that is empty or doesn't exist. Questions
that the record doesn't answer get their defaults. Projects made from this state of the template
call every later state in this way.
"""

import json
import sys
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[1]
# Its engine was in its own package, under its own names, so there is nothing to merge.
OF_0_2 = (
    "this project is of 0.2, which had no engine/ of its own; finish its runs on its own commit, "
    "then move to a new project: docs/from_0_2.md of the template says how"
)
sys.path.insert(0, str(ROOT))
from hooks.answers import QUESTIONS, Refused, checked  # noqa: E402
from hooks.project import make  # noqa: E402


def main(record: str, target: str) -> None:
    """Make the project."""
    record_values = json.loads(Path(record).read_text("utf-8"))
    if "extras" in record_values["answers"]:
        sys.exit(f"Error: {OF_0_2}")
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    answers = {name: record_values["answers"].get(name, questions[name]) for name in QUESTIONS}
    Path(target).mkdir(parents=True, exist_ok=True)
    origin = {name: record_values[name] for name in ("template", "commit", "directory")}
    try:
        make(ROOT, Path(target).resolve(), checked({**answers, "git_init": False}), origin)
    except Refused as refused:
        sys.exit(f"Error: {refused}")


if __name__ == "__main__":
    main(*sys.argv[1:])
