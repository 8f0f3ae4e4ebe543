"""A real shell completes the command's arguments."""

import os
import shutil
import subprocess
import sys

import pytest
from lockstep_gpt import PROJECT

from lockstep.commands import table

PROGRAM = PROJECT.program

COMPLETE = """
eval "$({program} train -sc install=bash)"
function=$(complete -p {program} | sed 's/.*-F \\([^ ]*\\).*/\\1/')
while read -r COMP_LINE; do
    COMP_LINE=${{COMP_LINE%.}}
    COMP_POINT=${{#COMP_LINE}}
    COMP_WORDS=($COMP_LINE)
    [[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    $function
    echo "${{COMPREPLY[@]}}"
done
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="no bash on this machine")
def test_bash_completes_commands_choices_and_settings(tmp_path):
    shim = tmp_path / PROGRAM
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep_gpt "$@"\n')
    shim.chmod(0o755)
    lines = {
        "": " ".join(name for name in table() if name != "-sc"),
        "tr": "train",
        "train model=gp": "model=gpt model=gpt2 model=gpt2_large model=gpt2_medium model=gpt2_xl",
        "train schedule.warm": "schedule.warmup=",
        "prepare data=st": "data=stdlib",
        "generate --pr": "",
    }
    typed = "".join(f"{PROGRAM} {line}.\n" for line in lines)  # the dot keeps a space at the end
    done = subprocess.run(
        ["bash", "-c", COMPLETE.format(program=PROGRAM)],
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        cwd=tmp_path,
        input=typed,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == list(lines.values())
