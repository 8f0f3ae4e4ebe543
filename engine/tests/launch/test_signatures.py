"""A signature that is read from a text is the one that an import finds, or there is none."""

import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path

import lightning
import pytest
import torch
import torchmetrics
from hydra.utils import get_object
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import callbacks, loggers, profilers, strategies
from torch.optim import lr_scheduler

from lockstep import configs
from lockstep.launch.signatures import Values, signature_of

pytest.importorskip("transformers")  # some projects lack it

LIGHTNINGS = [
    f"{package.__name__}.{name}"
    for package in (callbacks, loggers, profilers, strategies)
    for name in package.__all__
]
TORCHS = [
    f"{package.__name__}.{name}"
    for package in (torch.optim, lr_scheduler, torch.utils.data)
    for name in package.__all__
]
METRICS = [f"torchmetrics.{name}" for name in torchmetrics.__all__]
CONFIGS = Path(__file__).parents[3] / "configs"
OURS = sorted(
    {
        target
        for folder in (CONFIGS, Path(configs.__file__).parent)
        for path in folder.rglob("*.yaml")
        for target in re.findall(r"^ *_target_: (lockstep\S+)", path.read_text(), re.MULTILINE)
    }
)
MUST_BE_READ = [
    *OURS,
    "hydra.utils.get_method",
    "lightning.LightningDataModule",
    "lightning.LightningModule",
    "lightning.Trainer",
    "lightning.pytorch.Trainer",
    "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "lightning.pytorch.callbacks.Timer",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.MLFlowLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.strategies.DDPStrategy",
    "lightning.pytorch.strategies.FSDPStrategy",
    "lightning.pytorch.strategies.SingleDeviceStrategy",
    "lockstep.loggers.wandb_run.WandbRun",
    "lockstep.muon.optimizer.Muon",
    "torch.nn.Conv2d",
    "torch.nn.Linear",
    "torch.nn.Sequential",
    "torch.nn.functional.relu",
    "torch.optim.AdamW",
    "torch.optim.SGD",
    "torch.optim.lr_scheduler.CosineAnnealingLR",
    "torch.optim.lr_scheduler.OneCycleLR",
    "torch.optim.lr_scheduler.ReduceLROnPlateau",
    "torch.utils.data.DataLoader",
    "torchmetrics.MeanMetric",
    "torchmetrics.regression.MeanSquaredError",
]
# A `__new__` that makes another class, decorators of theirs, C, a name that only an import gives.
ONLY_IMPORTS_TELL = [
    "builtins.dict",
    "collections.OrderedDict",
    "datetime.timedelta",
    "functools.partial",
    "math.sqrt",
    "torch.Tensor",
    "torch.nn.Parameter",
    "torchmetrics.Accuracy",
    "transformers.GPT2Config",
    "transformers.GPT2LMHeadModel",
    "nowhere.Class",
    "lightning.Nothing",
    "a..b",
    "__main__.Mine",
]
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NUMBER = itertools.count()


def read(target):
    """Return name, kind, and whether it is required of each argument that the text shows."""
    signature = signature_of(target)
    return signature and [(item.name, item.kind, item.is_required) for item in signature.parameters]


def imported(found):
    """Return the same of something imported."""
    return [
        (item.name, item.kind, item.default is item.empty and item.kind not in OPEN)
        for item in inspect.signature(found).parameters.values()
    ]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return a function that writes and imports a module of the folder where ranks start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**codes):
        for name, code in codes.items():
            path = tmp_path / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        importlib.invalidate_caches()

    before = {*sys.modules}
    yield write
    for name in {*sys.modules} - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.mark.parametrize("target", MUST_BE_READ)
def test_what_projects_name_most_has_the_signature_of_its_import(target):
    assert read(target) == imported(get_object(target))


@pytest.mark.parametrize(
    "targets", [LIGHTNINGS, TORCHS, METRICS], ids=["lightning", "torch", "metrics"]
)
def test_whatever_is_read_of_a_whole_library_is_what_its_import_has(targets):
    unread = [target for target in targets if read(target) is None]
    for target in {*targets} - {*unread}:
        assert read(target) == imported(get_object(target)), target
    assert len(unread) < len(targets) / 3


@pytest.mark.parametrize("target", ONLY_IMPORTS_TELL)
def test_what_only_an_import_can_tell_has_no_signature(target):
    assert signature_of(target) is None


FORMS = {
    "own": "class C:\n    def __init__(self, a, b=1, *, c, d=2): pass",
    "none": "class C: pass",
    "base": "class A:\n    def __init__(self, a): pass\nclass C(A): x = 1",
    "diamond": (
        "class A:\n    def __init__(self, a): pass\nclass B(A): pass\n"
        "class D(A):\n    def __init__(self, d): pass\nclass C(B, D): pass"
    ),
    "alias": "class A:\n    def __init__(self, a): pass\nC = A",
    "abstract": (
        "import abc\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\n"
        "class C(abc.ABC, Generic[T]):\n    def __init__(self, a: T): pass"
    ),
    "metaclass": "import abc\nclass C(metaclass=abc.ABCMeta):\n    def __init__(self, a): pass",
    "overloads": (
        "from typing import overload\nclass C:\n    @overload\n    def __init__(self): ...\n"
        "    @overload\n    def __init__(self, a): ...\n    def __init__(self, *a): pass"
    ),
    "dataclass": (
        "from dataclasses import dataclass, field, KW_ONLY\nimport dataclasses\n"
        "from typing import ClassVar\n@dataclass\nclass A:\n    a: int\n    b: 'list[int]' = "
        "field(default_factory=list)\n    kind: ClassVar[str] = ''\n"
        "    n: int = field(init=False)\n"
        "@dataclasses.dataclass(frozen=True, eq=False)\nclass B:\n    z: int\n"
        "@dataclass\nclass C(A):\n    a: str = 'x'\n    _: KW_ONLY\n    q: int\n"
        "    r: dataclasses.InitVar[int] = 3"
    ),
    "keywords": (
        "from dataclasses import dataclass, field\n@dataclass(kw_only=True)\nclass C:\n"
        "    a: int = 1\n    b: str\n    c: int = field(kw_only=False)"
    ),
    "derived from a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int\nclass C(A): pass"
    ),
    "dataclass with its own": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    a: int\n"
        "    def __init__(self, b): pass"
    ),
    "no init": (
        "from dataclasses import dataclass\nclass A:\n    def __init__(self, z): pass\n"
        "@dataclass(init=False)\nclass C(A):\n    a: int"
    ),
    "named tuple": (
        "from typing import NamedTuple\nclass C(NamedTuple):\n    a: int\n    b: int = 1"
    ),
    "function": "def C(a, /, b, *more, c=1, **others): pass",
    "branch": "import sys\nif sys:\n    def C(a): pass",
    "decorated": "import functools\n@functools.cache\ndef C(a, b=1): pass",
}


@pytest.mark.parametrize("code", FORMS.values(), ids=FORMS)
def test_each_form_of_a_class_or_function_is_read_as_python_calls_it(code, modules):
    modules(formed=code)
    assert read("formed.C") == imported(importlib.import_module("formed").C)


def test_methods_are_read_without_what_python_gives_them(modules):
    modules(
        methods=(
            "class A:\n    @classmethod\n    def make(cls, a, *, b=1): pass\n"
            "    @staticmethod\n    def help(a): pass\n    def plain(self, a): pass\n"
            "    class Inner:\n        def __init__(self, x): pass\nclass C(A): pass"
        )
    )
    found = importlib.import_module("methods").C
    for name in ("make", "help", "plain", "Inner"):
        assert read(f"methods.C.{name}") == imported(getattr(found, name))


HIDDEN = {
    "unknown decorator": "def deco(f): return print\n@deco\ndef C(a): pass",
    "wrapped constructor": (
        "def deco(f): return lambda self, *a, **k: None\nclass C:\n"
        "    @deco\n    def __init__(self, a): pass"
    ),
    "decorated base": (
        "def deco(c):\n    return type('A', (), {})\n@deco\nclass A:\n"
        "    def __init__(self, a): pass\nclass C(A): pass"
    ),
    "metaclass": (
        "class M(type):\n    def __call__(cls, **k): return k\n"
        "class C(metaclass=M):\n    def __init__(self, a): pass"
    ),
    "inherited metaclass": (
        "class M(type):\n    def __call__(cls, **k): return k\n"
        "class A(metaclass=M): pass\nclass C(A):\n    def __init__(self, a): pass"
    ),
    "new": "class C:\n    def __new__(cls, **k): return k\n    def __init__(self, a): pass",
    "inherited new": (
        "class A:\n    def __new__(cls, **k): return k\nclass C(A):\n"
        "    def __init__(self, a): pass"
    ),
    "subclass hook": (
        "class A:\n    def __init_subclass__(cls): cls.__init__ = lambda self, **k: None\n"
        "class C(A):\n    def __init__(self, a): pass"
    ),
    "assigned constructor": (
        "class C:\n    def __init__(self, a): pass\nC.__init__ = lambda self, **k: None"
    ),
    "set constructor": (
        "class C:\n    def __init__(self, a): pass\nsetattr(C, '__init__', lambda self, **k: None)"
    ),
    "changed by a call": (
        "class C:\n    def __init__(self, a): pass\n"
        "def change():\n    globals()['C'] = dict\nchange()"
    ),
    "changed by global": (
        "class C:\n    def __init__(self, a): pass\n"
        "def change():\n    global C\n    C = dict\nchange()"
    ),
    "two meanings": (
        "def C(a): pass\ntry:\n    from builtins import dict as C\nexcept ImportError: pass"
    ),
    "deleted": "def C(a): pass\ndef D(b): pass\nC = D",
    "star": "def C(a): pass\nfrom other_star import *",
    "made": "C = type('C', (), {})",
    "lambda": "C = lambda a: a",
    "enum": "import enum\nclass C(enum.Enum):\n    def __init__(self, a): pass",
    "own fields": (
        "from dataclasses import dataclass, field\ndef setting(): return field(default=1)\n"
        "@dataclass\nclass C:\n    a: int = setting()"
    ),
    "fields in a branch": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    if True:\n        a: int"
    ),
    "keyword of a class": (
        "class A:\n    def __init_subclass__(cls, **k): pass\nclass C(A, x=1): pass"
    ),
    "no constructor of a dictionary": "class C(dict): pass",
    "property": "class A:\n    @property\n    def b(self): pass\nC = A.b",
    "protocol": "from typing import Protocol\nclass C(Protocol): pass",
    "loop": "from hidden import C",
    "broken": "class C(:",
}


@pytest.mark.parametrize("code", HIDDEN.values(), ids=HIDDEN)
def test_a_text_that_does_not_show_how_it_is_called_has_no_signature(code, modules):
    modules(hidden=code, other_star="def C(b): pass")
    assert signature_of("hidden.C") is None


def test_imports_between_files_are_followed(modules):
    modules(
        pack__in____init__=(
            "import importlib\nfrom typing import TYPE_CHECKING\n"
            "from .deep import Deep as Deep\nfrom . import names\nfrom .same import same\n"
            "import pack.names as other\n"
            "if TYPE_CHECKING:\n    from .late import Late\n"
            "else:\n    def __getattr__(name):\n"
            "        return getattr(importlib.import_module('pack.late'), name)\n"
        ),
        pack__in__deep="from pack.names import Base\nclass Deep(Base): pass",
        pack__in__names="class Base:\n    def __init__(self, a, b=2): pass",
        pack__in__late=(
            "from . import names\nclass Late(names.Base):\n    def __init__(self, z): pass"
        ),
        pack__in__same="def same(x): pass\ndef make(): pass",
        starred="from pack.names import *\nimport pack.deep\nNew = pack.deep.Deep",
    )
    for target in (
        "pack.Deep",
        "pack.names.Base",
        "pack.other.Base",
        "pack.Late",
        "starred.Base",
        "starred.New",
    ):
        assert read(target) == imported(get_object(target)), target
    assert signature_of("pack.same") is None  # a function and a module of one name
    assert signature_of("pack.same.make") is None


def test_a_changed_file_is_read_again(modules):
    modules(changing="def f(a): pass")
    assert read("changing.f") == [("a", inspect.Parameter.POSITIONAL_OR_KEYWORD, True)]
    modules(changing="def f(another): pass")
    assert read("changing.f") == [("another", inspect.Parameter.POSITIONAL_OR_KEYWORD, True)]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("a: int", Values(frozenset({int}))),
        ("a: 'int'", Values(frozenset({int}))),
        ("a: float = 1", Values(frozenset({float, int}))),
        ("a: str | None", Values(frozenset({str}))),
        ("a: Optional[bool] = None", Values(frozenset({bool}))),
        ("a: typing.Union[int, str] = 'x'", Values(frozenset({int, str}))),
        ("a: Literal['x', 'y']", Values(choices=("x", "y"))),
        ("a: Literal['x'] | bool = True", Values(frozenset({bool}), ("x",))),
        ("a: Literal['x'] | bool = 'x'", Values(frozenset({bool}), ("x",))),
        ("a: Literal['x', None] = 'z'", Values(choices=("x", "z"))),
        ("a: int | list[int]", None),
        ("a: int = DEFAULT", None),
        ("a: int = ()", None),
        ("a: Number", None),
        ("a: shadowed", None),
        ("a: None", None),
        ("a", None),
    ],
)
def test_an_annotation_of_plain_kinds_says_which_values_fit(code, values, modules):
    modules(
        annotated=(
            "import typing\nfrom typing import Literal, Optional\nNumber = int\nDEFAULT = 3\n"
            f"class shadowed: pass\ndef f({code}): pass"
        )
    )
    signature = signature_of("annotated.f")
    assert signature.parameters[0].values == values


def test_the_usual_bases_leave_the_call_to_the_constructor_of_a_class():
    for base in (torch.nn.Module, lightning.LightningModule, lightning.LightningDataModule):
        assert type(base) is type
        for kind in base.__mro__[:-1]:
            assert not {"__new__", "__init_subclass__", "__signature__"} & vars(kind).keys()


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=0, max_size=6, unique=True)


@st.composite
def argument_lists(draw):
    """Draw an argument list of Python."""
    names = draw(NAMES)
    cuts = sorted(draw(st.tuples(*[st.integers(0, len(names))] * 2)))
    by_place, plain, named = names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]
    first_default = draw(st.integers(0, len(by_place) + len(plain)))
    words = []
    for index, name in enumerate([*by_place, *plain]):
        words.append(name if index < first_default else f"{name}: int = {index}")
        if index + 1 == len(by_place):
            words.append("/")
    star = draw(st.booleans())
    if star or named:
        words.append("*args" if star else "*")
    words += [name + draw(st.sampled_from(["", " = None"])) for name in named]
    words += draw(st.sampled_from([[], ["**kwargs"]]))
    return ", ".join(words)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(listed=argument_lists(), form=st.sampled_from(["function", "own", "base"]))
def test_any_argument_list_is_read_as_python_reads_it(listed, form, modules):
    name = f"drawn_{next(NUMBER)}"
    method = f"    def __init__({', '.join(filter(None, ['self', listed]))}): pass"
    if listed.partition("/")[1]:  # self is one of the arguments by place then
        method = f"    def __init__(self, {listed}): pass"
    code = {
        "function": f"def C({listed}): pass",
        "own": f"class C:\n{method}",
        "base": f"class A:\n{method}\nclass C(A): pass",
    }[form]
    modules(**{name: code})
    assert read(f"{name}.C") == imported(importlib.import_module(name).C)
