"""A folder of `extras/` can be deleted by hand: what is left lints, collects its tests, trains.

`scripts/deletions.py` does the same for every two of them, and runs whole suites.
"""

import json
import subprocess
import sys

from scripts.deletions import FOLDERS, copy_without

# Imports the libraries once, and is forked for each project: it collects its tests and trains.
DRIVER = """
import contextlib, io, json, os, sys, traceback
import datasets, kubeflow_trainer_api.models, lightning, pytest, torch, transformers, wandb
results = {}
for project in json.loads(sys.argv[1]):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.chdir(project)
        sys.path.insert(0, os.path.join(project, "src"))
        printed = io.StringIO()
        status = 1
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                quiet = ["-q", "--assert=plain", "-p", "no:cacheprovider"]
                status = int(pytest.main(["--collect-only", *quiet]))
                if not status:
                    import my_gpt.cli
                    words = ["train", "experiment=smoke", "logger=none", "launch.inline=true"]
                    status = my_gpt.cli.main([*words, "run_dir=runs/one"])
        except BaseException:
            status = 1
            traceback.print_exc(file=printed)
        finally:
            text = "" if status == 0 else printed.getvalue()[-3000:]
            os.write(writes, json.dumps([status, text]).encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        results[project] = json.load(answer)
    os.waitpid(child, 0)
print(json.dumps(results))
"""


def driven(projects, environment):
    """Return exit status and last words by the name of each project's folder."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([*map(str, projects)])],
        env=environment(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return {path.name: json.loads(done.stdout.splitlines()[-1])[str(path)] for path in projects}


def test_without_any_one_a_project_collects_its_tests_and_trains(
    baked, tmp_path, environment, types
):
    projects = [tmp_path / extra for extra in FOLDERS]
    for project in projects:
        copy_without(baked(extras="all"), project, [project.name])
        for words in (["ruff", "check", "--no-cache"], ["mypy", "--cache-dir", str(types)]):
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=project,
                env=environment(),
                capture_output=True,
                encoding="utf-8",
            )
            assert done.returncode == 0, f"{project.name}\n{done.stdout}"
    found = driven(projects, environment)
    assert {name: each for name, each in found.items() if each[0]} == {}
