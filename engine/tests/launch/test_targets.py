"""Mistakes in `_target_` nodes are refused before ranks start, without importing what they name."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import lightning
import pytest
from lightning.pytorch import callbacks, loggers, strategies
from lockstep_gpt import CONFIGS, PROJECT

from lockstep import commands as cli
from lockstep.errors import UserError
from lockstep.launch.targets import REFUSED, refuse_mistakes

PROGRAM = PROJECT.program

LIGHTNINGS = "lightning.pytorch.callbacks"
HIDING = {
    "star": "from math import *",
    "attribute": "def __getattr__(name):\n    return print",
    "dictionary": "globals()['Mine'] = print",
    "broken": "class Mine(:",
}


def check(node):
    """Check whether what a callback's settings name exists."""
    refuse_mistakes({"callbacks": {"mine": node}}, {"*": ("*",)})


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return a function that writes a module to the folder where ranks start."""
    monkeypatch.chdir(tmp_path)

    def write(name, code):
        # An earlier test may have left its own module of this name, or its folder, to search in.
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
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
        ("lockstep.callbacks.progress.Progres", "did you mean Progress?"),
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
        for name in {*package.__all__} - {*REFUSED}:
            check({"_target_": f"{package.__name__}.{name}"})
            check({"_target_": f"{getattr(package, name).__module__}.{name}"})


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_would_change_the_experiment_is_refused_with_the_reason(name):
    with pytest.raises(UserError, match=f"^callbacks.mine: Lightning's {name} {REFUSED[name]}$"):
        check({"_target_": f"{LIGHTNINGS}.{name}"})


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
        "import sys; from lockstep.launch import targets; "
        f"assert targets.mistake_in('{LIGHTNINGS}.EarlyStopping') is None; "
        "assert targets.mistake_in('torch.nn.Linear') is None; "
        f"node = {{'_target_': '{LIGHTNINGS}.EarlyStopping', 'monitor': 'x', 'patience': 3}}; "
        "linear = {'_target_': 'torch.nn.Linear', 'in_features': 3, 'out_features': 3}; "
        "targets.refuse_mistakes({'one': node, 'two': linear}); "
        "print({'torch', 'lightning'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "set()\n"


STOP = f"{LIGHTNINGS}.EarlyStopping"
LINEAR = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
OWN = """
from dataclasses import dataclass
from typing import Literal

def sized(size: int, rate: float = 0.1, name: str = "x", on: bool = False,
          mode: Literal["fast", "exact"] = "fast", both: "int | str | None" = None,
          switch: Literal["auto"] | bool = "auto", free=None, many: int | list[int] = 1): ...

def placed(first, /, second, *, third=0): ...
def empty(): ...
def open_(size: int, **others): ...

@dataclass
class Pair:
    left: int
    right: str = ""
"""
WRONG_ARGUMENTS = [
    (
        {"_target_": STOP, "monitor": "x", "patiance": 3},
        "callbacks.mine.patiance=3: EarlyStopping has no argument patiance; did you mean patience?",
    ),
    ({"_target_": STOP}, "callbacks.mine: EarlyStopping needs monitor; set callbacks.mine.monitor"),
    (
        {"_target_": STOP, "monitor": "???"},
        "callbacks.mine: EarlyStopping needs monitor; set callbacks.mine.monitor",
    ),
    (
        {"_target_": STOP, "monitor": "x", "patience": "three"},
        "callbacks.mine.patience=three must be a whole number",
    ),
    (
        {"_target_": "own.placed", "_args_": [1], "thrid": 1, "second": 2},
        "callbacks.mine.thrid=1: placed has no argument thrid; did you mean third?",
    ),
    (
        {"_target_": "own.placed", "_args_": [1]},
        "callbacks.mine: placed needs second; set callbacks.mine.second",
    ),
    (
        {"_target_": "own.placed"},
        "callbacks.mine: placed needs first and second; set callbacks.mine.first and "
        "callbacks.mine.second",
    ),
    (
        {"_target_": "own.placed", "first": 1, "second": 2},
        "callbacks.mine.first=1: placed has no argument first; use second or third",
    ),
    (
        {"_target_": "own.empty", "a": {"b": 1}},
        "callbacks.mine.a: empty has no argument a; it takes none, so leave it out",
    ),
    (
        {"_target_": STOP, "monitor": "x", "zzz": None},
        "callbacks.mine.zzz=null: EarlyStopping has no argument zzz; correct it, or leave it out",
    ),
    (
        {"_target_": "own.Pair", "left": 1, "rihgt": "x"},
        "callbacks.mine.rihgt=x: Pair has no argument rihgt; did you mean right?",
    ),
    ({"_target_": "own.open_"}, "callbacks.mine: open_ needs size; set callbacks.mine.size"),
]
WRONG_KINDS = {
    "size": {
        "eight": "size=eight must be a whole number",
        2.5: "size=2.5 must be a whole number",
        "8": 'size="8" must be a whole number',
    },
    "rate": {"fast": "rate=fast must be a number"},
    "name": {2024: 'name=2024 must be text; write "2024" in quotes'},
    "on": {"perhaps": "on=perhaps must be true or false", 3: "on=3 must be true or false"},
    "mode": {
        "exakt": "mode=exakt is not one of fast, exact; did you mean exact?",
        False: "mode=false is not one of fast, exact",
        3: "mode=3 is not one of fast, exact",
    },
    "both": {2.5: "both=2.5 must be a whole number or text"},
    "switch": {3: "switch=3 must be auto or true or false"},
}
VALID = {
    "size": (8, 1e3, True, False, None, "${seed}", "???", [1], {"a": 1}),
    "rate": (1, 0.5, True, None, "${oc.env:RATE}"),
    "name": ("x", "2024", "", False, None),
    "on": (True, 0, 1, None),
    "mode": ("fast", None, "${mode}"),
    "both": (1, "x", None),
    "switch": ("auto", True, None),
    "free": (1, "x", 2.5, [1]),
    "many": ("x", [1]),
}


@pytest.fixture
def own(modules):
    """Write a module with functions and a class."""
    modules("own", OWN)


@pytest.mark.parametrize(("node", "line"), WRONG_ARGUMENTS)
@pytest.mark.usefixtures("own")
def test_arguments_that_do_not_fit_are_refused_wherever_their_node_is(node, line):
    def refused(values, given=None):
        with pytest.raises(UserError) as refusal:
            refuse_mistakes(values, given)
        return str(refusal.value)

    place = "callbacks.mine"
    assert refused({"callbacks": {"mine": node}}) == line
    assert refused({"any": [[], {"deep": [LINEAR, node]}]}) == line.replace(place, "any.1.deep.1")
    outer = {"_target_": "own.open_", "size": 1, "inner": node}
    assert refused({"model": outer}) == line.replace(place, "model.inner")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [(name, value, line) for name, cases in WRONG_KINDS.items() for value, line in cases.items()],
)
@pytest.mark.usefixtures("own")
def test_a_value_of_another_kind_is_refused(name, value, line):
    with pytest.raises(UserError) as refusal:
        refuse_mistakes({"batch": {"_target_": "own.sized", "size": 1, name: value}})
    assert str(refusal.value) == f"batch.{line}"


@pytest.mark.parametrize("name", VALID)
@pytest.mark.usefixtures("own")
def test_a_value_that_may_work_is_left_to_what_takes_it(name):
    for value in VALID[name]:
        node = {"_target_": "own.sized", "_partial_": True, name: value}
        refuse_mistakes({"batch": node})


@pytest.mark.usefixtures("own")
def test_a_required_argument_may_come_from_elsewhere():
    lacking = {"_target_": "own.placed"}
    with pytest.raises(UserError):
        refuse_mistakes({"a": {"b": lacking}})
    refuse_mistakes({"a": {"b": {**lacking, "_partial_": True}}})
    refuse_mistakes({"a": {"b": {**lacking, "_args_": [1, 2], "_convert_": "all"}}})
    refuse_mistakes({"a": {"b": {**lacking, "_args_": "${seed}"}}})
    refuse_mistakes({"a": {"b": lacking, "_target_": "own.open_", "size": 1, "_recursive_": False}})
    for given in ({"a.b": {"first", "second"}}, {"a.*": {"first", "second"}}, {"*": ("*",)}):
        refuse_mistakes({"a": {"b": lacking}}, given)
    for given in ({"a.b": {"first"}}, {"b": {"first", "second"}}):
        with pytest.raises(UserError, match=r"^a\.b: placed needs "):
            refuse_mistakes({"a": {"b": lacking}}, given)


@pytest.mark.usefixtures("own")
def test_what_is_known_only_later_is_left_to_the_rank():
    refuse_mistakes({"a": {"_target_": "${b._target_}", "z": 1}, "b": {"_target_": None}})
    refuse_mistakes({"a": {"_target_": "own.open_", "size": 1, "anything": 1}})
    refuse_mistakes({"a": {"_target_": "builtins.dict", "anything": 1}})


def test_an_attribute_of_a_class_with_the_name_of_its_module_is_left_to_the_rank(modules):
    modules("nets/__init__", "from .net import net")
    modules("nets/net", "class net:\n    @classmethod\n    def small(cls): pass")
    refuse_mistakes({"module": {"_target_": "nets.net.small"}})


def test_every_argument_of_lightning_s_trainer_is_known(command):
    names = inspect.signature(lightning.Trainer).parameters
    refuse_mistakes({"trainer": {"_target_": "lightning.pytorch.Trainer", **dict.fromkeys(names)}})
    command("train", "experiment=smoke", "trainer.profile=simple", status=2)
    stderr = command("train", "experiment=smoke", "+trainer.profile=simple", status=2).stderr
    assert stderr.count("\n") == 1
    assert stderr.endswith(
        "trainer.profile=simple: Trainer has no argument profile; did you mean profiler?\n"
    )


TIMING = """
import sys, time
from hydra import compose, initialize_config_dir
from lockstep_gpt import CONFIGS
from lockstep.launch import module_texts
from lockstep.launch import targets
from lockstep.launch.hydra_job import values_to_freeze
with initialize_config_dir(str(CONFIGS), version_base="1.3"):
    for name in sys.argv[1:]:
        values = values_to_freeze(compose("train", [f"experiment={name}"]))
        module_texts._parse.cache_clear()
        start = time.process_time()
        targets.refuse_mistakes(values, {"*": ("*",)})
        print(name, round(1000 * (time.process_time() - start)))
print({"torch", "lightning"} & {*sys.modules})
"""


def test_each_experiment_is_valid_and_is_checked_in_less_than_a_second():
    experiments = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
    done = subprocess.run(
        [sys.executable, "-c", TIMING, *experiments],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    *timed, imported = done.stdout.splitlines()
    assert imported == "set()"
    milliseconds = {name: int(time) for name, time in map(str.split, timed)}
    print(milliseconds)
    assert [*milliseconds] == experiments
    assert max(milliseconds.values()) < 1000


@pytest.mark.parametrize(
    ("library", "target"), [("mlflow", "MLFlowLogger"), ("tensorboard", "TensorBoardLogger")]
)
def test_a_tracker_whose_library_is_absent_is_refused_before_data_are_prepared(
    library, target, monkeypatch
):
    logger = {library: {"_target_": f"lightning.pytorch.loggers.{target}", "save_dir": "x"}}
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(__spec__=True))
    refuse_mistakes({"logger": logger})
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"^logger={library} needs {library}, which is not inst"):
        refuse_mistakes({"logger": logger})
