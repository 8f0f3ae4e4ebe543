"""Cookiecutter runs this before it writes anything, so answers from a replay file are checked."""

import json
import sys
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(json.loads(r"""[{{ template_root() | tojson }}]""")[0])
sys.path.insert(0, str(ROOT))
from hooks.answers import Refused, checked  # noqa: E402
from hooks.project import refuse_links  # noqa: E402

try:
    refuse_links(ROOT, Path.cwd(), checked(json.loads(r"""{{ cookiecutter | tojson }}""")))
except Refused as refused:
    sys.exit(f"Error: {refused}")
