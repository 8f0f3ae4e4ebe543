"""Cookiecutter runs this in the new project, where only the README stands so far."""

import json
import sys
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(json.loads(r"""[{{ template_root() | tojson }}]""")[0])
sys.path.insert(0, str(ROOT))
from hooks.answers import checked  # noqa: E402
from hooks.project import make  # noqa: E402

answers = checked(json.loads(r"""{{ cookiecutter | tojson }}"""))
print(
    make(
        ROOT, Path.cwd(), answers, under_cruft=json.loads(r"""[{{ under_cruft() | tojson }}]""")[0]
    )
)
