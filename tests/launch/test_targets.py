"""A `_target_` with a typo is refused before ranks start, without importing what it names."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch import callbacks, loggers, strategies

from lockstep_gpt import PROGRAM, cli
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.targets import refuse_absent_trackers, refuse_missing

LIGHTNINGS = "lightning.pytorch.callbacks"
HIDING = {
    "star": "from math import *",
    "attribute": "def __getattr__(name):\n    return print",
    "dictionary": "globals()['Mine'] = print",
    "broken": "class Mine(:",
}


def check(node):
    """Check a callback's settings."""
    empty = {"logger": {}, "strategy": {}, "trainer": {}, "module": {}}
    none = SimpleNamespace(_target_="")
    refuse_missing(SimpleNamespace(callbacks={"mine": node}, data=none, packing=none, **empty))


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return a function that writes a module to the folder where ranks start."""
    monkeypatch.chdir(tmp_path)

    def write(name, code):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)

    return write


@pytest.mark.parametrize(
    ("target", "mistake"),
    [
        (f"{LIGHTNINGS}.EarlyStoping", f"{LIGHTNINGS} has no EarlyStoping; did you mean Early"),
        (f"{LIGHTNINGS}.timr.Timer", f"{LIGHTNINGS} has no timr; did you mean timer?"),
        ("lightening.Trainer", "there is no module lightening; did you mean lightning?"),
        ("lockstep_gpt.run.callbacks.progress.Progres", "did you mean Progress?"),
        ("Zzz", "there is no module Zzz; correct it"),
        ("mine.Stop", "mine has no Stop; did you mean Stopp?"),
    ],
)
def test_a_missing_name_is_refused_with_the_nearest(target, mistake, modules):
    modules("mine", "if True:\n    class Stopp: pass")
    with pytest.raises(UserError) as refusal:
        check({"_target_": target})
    line = str(refusal.value)
    assert line.startswith(f"callbacks.mine._target_={target}: ")
    assert mistake in line
    with pytest.raises(UserError, match=r"^callbacks.mine.parts.0._target_="):
        check({"_target_": f"{LIGHTNINGS}.Timer", "parts": [{"_target_": target}]})


def test_all_that_lightning_exports_is_found():
    for package in (callbacks, loggers, strategies):
        for name in package.__all__:
            check({"_target_": f"{package.__name__}.{name}"})
            check({"_target_": f"{getattr(package, name).__module__}.{name}"})


@pytest.mark.parametrize("name", HIDING)
def test_names_that_the_text_does_not_show_are_left_to_the_rank(name, modules):
    modules(name, HIDING[name])
    check({"_target_": f"{name}.Mine"})


def test_names_that_only_an_import_gives_are_left_to_the_rank(modules):
    for target in (
        "math.nothing",
        "builtins.nothing",
        "torch.nn.Nothing",
        "a..b",
        "?",
        "__main__.A",
    ):
        check({"_target_": target})
    modules("outer/inner/deep", "class Mine: pass")  # packages without a file
    check({"_target_": "outer.inner.deep.Mine"})
    with pytest.raises(UserError, match="outer has no iner; correct it"):
        check({"_target_": "outer.iner.deep.Mine"})


def test_the_command_refuses_a_typo_with_one_line(capsys):
    assert cli.main(["train", f"+callbacks.stop._target_={LIGHTNINGS}.EarlyStoping"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{PROGRAM} train: callbacks.stop._target_={LIGHTNINGS}.EarlyStoping: ")
    assert err.endswith("did you mean EarlyStopping?\n")
    assert err.count("\n") == 1


def test_the_check_imports_nothing_that_it_looks_at():
    code = (
        "import sys; from lockstep_gpt.launch import targets; "
        f"assert targets._mistake_in('{LIGHTNINGS}.EarlyStopping') is None; "
        "assert targets._mistake_in('torch.nn.Linear') is None; "
        "print({'torch', 'lightning'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("library", "target"), [("mlflow", "MLFlowLogger"), ("tensorboard", "TensorBoardLogger")]
)
def test_a_tracker_whose_library_is_absent_is_refused_before_data_are_prepared(
    library, target, monkeypatch
):
    logger = {library: {"_target_": f"lightning.pytorch.loggers.{target}"}}
    config = SimpleNamespace(logger=logger)
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(__spec__=True))
    refuse_absent_trackers(config)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"^logger={library} needs {library}, which is not inst"):
        refuse_absent_trackers(config)
