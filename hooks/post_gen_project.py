"""Cookiecutter runs this in the new project, which only contains a raw README so far."""

import json
import os
import sys
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(json.loads(r"""[{{ template_root() | tojson }}]""")[0])
sys.path.insert(0, str(ROOT))
from hooks.answers import checked  # noqa: E402
from hooks.project import make, origin_of  # noqa: E402

answers = json.loads(r"""{{ cookiecutter | tojson }}""")
keep = json.loads(r"""{{ keeps_files() | tojson }}""")
template = answers.get("_template", "")  # cookiecutter doesn't clone a local path
fetched = "" if answers.get("_repo_dir", "").startswith(template) else template
screen = make(ROOT, Path.cwd(), checked(answers), origin_of(ROOT, fetched), keep)
try:
    print(screen, flush=True)
except OSError:  # nobody reads it anymore; the project is complete
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
