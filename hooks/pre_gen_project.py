"""Cookiecutter runs this before it writes anything: answers from a replay file are checked too."""

import json
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, json.loads(r"""[{{ template_root() | tojson }}]""")[0])
from hooks.answers import Refused, checked  # noqa: E402

try:
    checked(json.loads(r"""{{ cookiecutter | tojson }}"""))
except Refused as refused:
    sys.exit(f"Error: {refused}")
