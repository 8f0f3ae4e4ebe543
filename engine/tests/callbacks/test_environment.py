import json
import sys

import torch


def test_a_run_records_its_environment(finished):
    noted = json.loads((finished[0].folder / "runs/first/environment.json").read_text())
    assert noted["torch"] == torch.__version__
    assert noted["python"] == ".".join(map(str, sys.version_info[:3]))
