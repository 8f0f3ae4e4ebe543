"""The engine's pages: every block of Python runs, and every public name has its page."""

import re
from pathlib import Path

import pytest

import lockstep
from lockstep import project

ENGINE = Path(__file__).parents[2]
PAGES = {path.name: path.read_text("utf-8") for path in ENGINE.glob("docs/*.md")}
README = (ENGINE / "README.md").read_text("utf-8")
FILE = re.compile(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_PROGRAM = ("start.md", "testing.md", "evidence.md")  # the others use the program of the first


def blocks_of(text):
    """Return the blocks that a reader runs; a block below a file's name is that file."""
    return PYTHON.findall(FILE.sub("", text))


EXAMPLES = {name: blocks_of(text) for name, text in PAGES.items() if name not in OF_PROGRAM}
EXAMPLES = {name: blocks for name, blocks in EXAMPLES.items() if blocks}


@pytest.fixture
def run(command, python_of_forks):
    """Run Python in a folder, quickly; return its output."""

    def run_in(folder, *words):
        process = command.elsewhere(folder).start_words([python_of_forks, *words])
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, out + err
        return out

    return run_in


def test_every_public_name_is_in_the_table_and_on_its_page():
    rows = re.findall(r"^\| (`.+`) \| .+ \| \[.+\]\(docs/([\w.]+).*\) \|$", README, re.MULTILINE)
    listed = [(name, page) for names, page in rows for name in re.findall(r"`(\w+)`", names)]
    names = [name for name, _ in listed]
    values = {"NUMERICS"}  # has a sentence instead
    assert sorted(name for name in names if hasattr(lockstep, name)) == sorted(
        {*lockstep.__all__} - values
    )
    assert "`lockstep.NUMERICS`" in README
    for name, page in listed:
        text = PAGES[page]
        assert f"lockstep.{name}" in text or f"`{name}" in text, f"{page}: {name}"


def test_every_page_is_in_the_readme():
    assert {name for name in PAGES if f"](docs/{name}" not in README} == set()


def test_the_engine_s_pages_do_not_name_the_project():
    for name, text in {"README.md": README, **PAGES}.items():
        assert not re.search("lockstep[-_]gpt", text), name


@pytest.mark.slow
def test_the_readme_s_example_prints_the_same_digits_on_any_number_of_ranks(tmp_path, run):
    (tmp_path / "train.py").write_text(PYTHON.findall(README)[0])
    told = []
    for ranks in (1, 4):
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        out = run(tmp_path, *(launcher if ranks > 1 else []), "train.py")
        told.append(re.findall(r"^-?\d+\.\d+$", out, re.MULTILINE))
    assert told[0] == told[1]
    assert len(told[0]) == 2
    assert float(told[0][0]) < 1  # of 8


@pytest.mark.slow
def test_the_other_blocks_of_the_readme_go_on_with_its_example(tmp_path, run):
    blocks = PYTHON.findall(README)
    assert len(blocks) >= 5
    (tmp_path / "train.py").write_text("\n".join(blocks))
    run(tmp_path, "train.py")


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(EXAMPLES))
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, run):
    (tmp_path / "page.py").write_text("\n".join(EXAMPLES[page]))
    run(tmp_path, "page.py")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The folder with the program of a page."""
    folder = tmp_path_factory.mktemp("program")
    files = FILE.findall(PAGES["start.md"])
    assert [name for name, _ in files] == ["train.py", "configs/train.yaml"]
    for name, content in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.slow
def test_the_program_runs_as_its_page_says(program, run):
    (block,) = re.findall(r"^```bash\n(.*?)^```$", PAGES["start.md"], re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        words = line.split()
        module = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
        run(program, *module, *words[1:])
    summaries = [path.read_text() for path in sorted(program.glob("runs/*/summary.json"))]
    hashes = {digest for text in summaries for digest in re.findall(r'"20": "(\w+)"', text)}
    assert len(summaries) == 3
    assert len(hashes) == 1
    rows = (program / "runs/one/metrics.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == ["10", "20", "30"]


@pytest.fixture
def promise(program, monkeypatch):
    """The names of the page's tests, in the folder of their program."""
    monkeypatch.chdir(program)
    names = {}
    exec(PYTHON.findall(PAGES["testing.md"])[0], names)
    assert len([name for name in names if name.startswith("test_")]) == 2
    return names


@pytest.mark.slow
def test_the_program_keeps_the_promise_as_the_page_tests_it(promise, python_of_forks):
    promise["PROGRAM"][0] = python_of_forks
    promise["test_devices_change_only_the_speed"]()


@pytest.mark.slow
def test_the_loop_keeps_what_is_better(program, run):
    (code,) = PYTHON.findall(PAGES["evidence.md"])
    (program / "loop.py").write_text(code)
    worse, better, kept = run(program, "loop.py").splitlines()
    assert worse.startswith("module.lr=0.001: lr=0.001 is worse than base by ")
    assert better.startswith("module.lr=0.1: lr=0.1 is better than base by ")
    assert kept == "kept: module.lr=0.1"


@pytest.mark.slow
def test_the_killed_program_keeps_the_promise_as_the_page_tests_it(promise):
    promise["test_a_killed_run_has_the_same_bits"]()  # kills the real Python


def test_a_project_that_begins_as_the_page_says_has_the_commands_of_its_table():
    from lockstep.commands import OF_PACKAGES, OURS

    text = PAGES["commands.md"]
    rows = re.findall(r"^\| (.*`.+) \| .+ \|$", text, re.MULTILINE)
    listed = {name for cell in rows[:5] for name in re.findall(r"`(\w+)`", cell)}
    before = project.found()
    names = {}
    try:
        exec(PYTHON.findall(text)[0], names)
        assert project.program() == "my-gpt"
    finally:
        if before is not None:
            project.begin(before)
    assert listed == {*OURS} - {*OF_PACKAGES}
    for name in OF_PACKAGES:
        assert name.startswith("-") or f"`{name}`" in text
