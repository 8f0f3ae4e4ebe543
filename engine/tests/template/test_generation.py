"""How a project is generated: from a template anywhere, into any folder."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

JUNK = (
    ".env",
    ".hypothesis/unicode_data/x",
    ".mypy_cache/x.json",
    ".pytest_cache/README.md",
    ".ruff_cache/x",
    ".venv/pyvenv.cfg",
    "configs/model/__pycache__/x.pyc",
    "data/stdlib/train.bin",
    "dist/x.whl",
    "lockstep_gpt.egg-info/PKG-INFO",
    "runs/first/train.log",
    "src/lockstep_gpt.egg-info/PKG-INFO",
    "engine/src/lockstep/__pycache__/batch.pyc",
    "src/lockstep_gpt/__pycache__/gpt.pyc",
    "uv.lock",
    "wandb/run-1/x.wandb",
)
# Unknown to git, and in no .gitignore; it may be private.
PRIVATE = (".DS_Store", ".idea/workspace.xml", "id_ed25519", "notes/todo.md", "src/.DS_Store")
NEW = "src/lockstep_gpt/new.py"  # staged files aren't junk
ENDS = b"\xff\xfe no text \r\n"
SCREEN = """\
my-gpt: {} files and engine/, package my_gpt, MIT license; a git repository with its first commit
next:
  cd my-gpt
  python3 scripts/dev.py train
  python3 scripts/dev.py test
"""


def write(folder: Path, name: str, content: bytes = b"x\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def littered(template, tmp_path, git):
    """A copy of the template with junk, a new file, and a file that isn't text."""
    copy = tmp_path / "littered"
    shutil.copytree(template, copy)
    for name in (*JUNK, *PRIVATE):
        write(copy, name)
    write(copy, NEW, b"import lockstep_gpt\n")
    write(copy, "configs/ends.bin", ENDS)
    git(copy, "add", NEW, "configs/ends.bin")
    return copy


def test_the_screen_shows_the_result_and_the_next_commands(generate, tmp_path, tree):
    done = generate(tmp_path)
    own = [name for name in tree(tmp_path / "my-gpt") if not name.startswith("engine/")]
    assert done.stdout == SCREEN.format(len(own))
    assert done.stderr == ""


@pytest.mark.slow
def test_a_clone_a_zip_and_another_call_give_the_same_bytes(
    generate, baked, template, zipped, tmp_path, tree, git
):
    expected = tree(baked())
    recorded = json.loads(expected.pop(".template.json")[1])
    commit = git(template, "rev-parse", "HEAD").strip()
    for name, source, origin in (
        ("path", template, (str(template), commit)),
        ("clone", f"git+file://{template}", (f"file://{template}", commit)),
        ("zip", zipped, (str(zipped), None)),
    ):
        generate.of(source)(tmp_path / name, "git_init=no")
        files = tree(tmp_path / name / "my-gpt")
        record = json.loads(files.pop(".template.json")[1])
        assert (record["template"], record["commit"]) == origin
        assert record["answers"] == recorded["answers"]
        assert files == expected, name


def test_a_zip_without_a_folder_is_rejected_but_works_unpacked(
    generate, baked, zipped, tmp_path, tree
):
    flat, unpacked = tmp_path / "flat.zip", tmp_path / "unpacked"
    with zipfile.ZipFile(zipped) as forge:
        names = [name for name in forge.namelist() if not name.endswith("/")]
        with zipfile.ZipFile(flat, "w") as archive:
            for name in names:
                archive.writestr(name.partition("/")[2], forge.read(name))
    done = generate.of(flat)(tmp_path / "made", status=1)
    assert "does not include a top-level directory" in done.stdout + done.stderr  # cookiecutter's
    with zipfile.ZipFile(flat) as archive:
        archive.extractall(unpacked)
    generate.of(unpacked)(tmp_path / "made", "git_init=no")
    files, expected = tree(tmp_path / "made/my-gpt"), tree(baked())
    assert {*files} == {*expected}
    del files[".template.json"], expected[".template.json"]
    assert files == expected


@pytest.mark.slow
def test_a_template_may_be_in_a_folder_of_a_repository(
    generate, baked, template, tmp_path, tree, git, committed
):
    mono = tmp_path / "mono"
    for name in git(template, "ls-files", "-z").rstrip("\0").split("\0"):
        write(mono, f"part/{name}", (template / name).read_bytes())
    committed(mono)
    write(mono, "part/src/lockstep_gpt/key.pem")
    expected = tree(baked())
    del expected[".template.json"]
    for name, source in (("path", mono), ("clone", f"git+file://{mono}")):
        generate.of(source)(tmp_path / name, "git_init=no", "--directory", "part")
        files = tree(tmp_path / name / "my-gpt")
        record = json.loads(files.pop(".template.json")[1])
        assert (record["template"].removeprefix("file://"), record["directory"]) == (
            str(mono),
            "part",
        )
        assert files == expected


def test_the_record_names_no_password(template):
    from hooks.project import _without_secrets, origin_of

    url = "https://me:token@forge.example/lockstep.git"
    assert _without_secrets(url) == "https://forge.example/lockstep.git"
    assert origin_of(template)["template"] == str(template)


def test_the_record_names_the_url_of_a_clone_whatever_its_remote_is_called(upstream, tmp_path, git):
    from hooks.project import origin_of

    url = f"file://{upstream}"
    git(tmp_path, "-c", "clone.defaultRemoteName=theirs", "clone", "-q", url, "clone")
    assert origin_of(tmp_path / "clone", "gh:abbreviated")["template"] == url


def test_every_file_at_the_root_is_known(template, git):
    from hooks.project import OURS

    assert {name.split("/")[0] for name in git(template, "ls-files").splitlines()} == OURS


@pytest.mark.parametrize("is_repository", [True, False], ids=["repository", "plain folder"])
def test_untracked_files_are_left_out_and_added_ones_copied(
    is_repository, generate, littered, tmp_path, tree
):
    if not is_repository:
        shutil.rmtree(littered / ".git")
    before = {name for name in tree(littered) if "hooks/__pycache__" not in name}
    generate.of(littered)(tmp_path, "git_init=no")
    files = tree(tmp_path / "my-gpt")
    left = {name.replace("lockstep_gpt", "my_gpt") for name in (*JUNK, *PRIVATE)}
    assert left & set(files) == set()
    assert files["src/my_gpt/new.py"] == (False, b"import my_gpt\n")
    assert files["configs/ends.bin"] == (False, ENDS)
    after = {name for name in tree(littered) if "hooks/__pycache__" not in name}
    assert after == before


def test_a_deleted_file_is_not_taken_though_git_still_has_it(generate, littered, tmp_path):
    (littered / "configs/model/gpt2.yaml").unlink()
    generate.of(littered)(tmp_path, "git_init=no")
    assert (tmp_path / "my-gpt/configs/model/nano.yaml").is_file()
    assert not (tmp_path / "my-gpt/configs/model/gpt2.yaml").exists()


@pytest.mark.parametrize("is_repository", [True, False], ids=["repository", "plain folder"])
def test_a_project_can_be_made_in_the_template_s_own_folder(
    is_repository, generate, littered, baked, tree
):
    if not is_repository:
        shutil.rmtree(littered / ".git")
    (littered / NEW).unlink()
    (littered / "configs/ends.bin").unlink()
    generate.of(".").run("cookiecutter", ".", "--no-input", "git_init=no", cwd=littered)
    files, expected = tree(littered / "my-gpt"), tree(baked())
    assert json.loads(files.pop(".template.json")[1])["template"] == str(littered)
    del expected[".template.json"]
    assert files == expected


@pytest.mark.slow
def test_a_second_call_fails_and_a_forced_one_keeps_user_files(generate, tmp_path, tree):
    generate(tmp_path, "git_init=no")
    project = tmp_path / "my-gpt"
    before = tree(project)
    write(project, "README.md", b"broken\n")
    files = {name: write(project, name) for name in ("notes.md", "src/my_gpt/own.py", ".env")}
    done = generate(tmp_path, status=1)
    assert done.stdout.splitlines() == [f'Error: "{project}" directory already exists']
    assert tree(project)["README.md"] == (False, b"broken\n")
    generate(tmp_path, "-f", "git_init=no")
    assert tree(project) == {**before, **dict.fromkeys(files, (False, b"x\n"))}


@pytest.mark.slow
def test_existing_files_are_kept_on_request(generate, tmp_path, tree):
    generate(tmp_path, "git_init=no")
    project = tmp_path / "my-gpt"
    before = tree(project)
    for name in ("README.md", "pyproject.toml", "LICENSE"):
        write(project, name, b"mine\n")
    (project / "configs/train.yaml").unlink()
    generate(tmp_path, "-f", "-s", "git_init=no")
    mine = dict.fromkeys(("README.md", "pyproject.toml", "LICENSE"), (False, b"mine\n"))
    assert tree(project) == {**before, **mine}
    (project / "README.md").unlink()
    generate(tmp_path, "-f", "-s", "git_init=no")
    assert tree(project)["README.md"] == before["README.md"]


@pytest.mark.parametrize("name", ["pyproject.toml", "configs", "src/my_gpt", "engine/src"])
def test_nothing_is_written_through_a_link(name, generate, tmp_path, tree):
    generate(tmp_path, "git_init=no")
    place, elsewhere = tmp_path / "my-gpt" / name, tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    write(elsewhere if elsewhere.is_dir() else tmp_path, "gpt.py", b"mine\n")
    before = tree(tmp_path)
    done = generate(tmp_path, "-f", "git_init=no", status=1)
    assert (
        f"Error: {name} is a link, and files are not written through links; remove it\n"
        in done.stderr
    )
    assert tree(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("screen", [">&-", "> /dev/full", "| true"])
def test_a_project_is_generated_with_a_closed_screen(screen, generate, tmp_path, environment):
    words = [sys.executable, "-m", "cookiecutter", generate.template, "--no-input", "-o", tmp_path]
    line = f"sleep 0.1; {shlex.join(map(str, words))} {screen}"
    settings = environment(HOME=str(generate.home), COOKIECUTTER_CONFIG=str(generate.config))
    subprocess.run(["bash", "-c", line], env=settings, check=True, capture_output=True)
    assert (tmp_path / "my-gpt/.git").is_dir()


@pytest.mark.parametrize("replayed", [False, True])
def test_without_hooks_generation_fails_in_one_line(replayed, generate, tmp_path):
    generate(tmp_path / "first", "git_init=no")
    words = ["--replay"] if replayed else ["--no-input"]
    words += ["--accept-hooks", "no", "-o", tmp_path / "second"]
    template = generate.template
    done = generate.run("cookiecutter", template, *words, cwd=tmp_path, status=1)
    assert re.fullmatch("Error: --accept-hooks no leaves nothing: .*\n", done.stderr)
    assert not (tmp_path / "second").exists()


def test_replay_gives_the_same_again(generate, template, tmp_path, tree):
    words = ["author=O'Reilly", "license=none", "git_init=no"]
    generate(tmp_path / "first", *words)
    again = ["--replay", "-o", tmp_path / "second"]
    generate.run("cookiecutter", template, *again, cwd=tmp_path)
    assert tree(tmp_path / "second" / "my-gpt") == tree(tmp_path / "first" / "my-gpt")


def test_git_init_makes_one_clean_commit_of_all_files(generate, tmp_path, tree, git):
    generate(
        tmp_path,
        "author=Ada Lovelace",
        "email=ada@here.org",
        'project_name=O\'Reilly "net"',
        "project_slug=my-gpt",
    )
    project = tmp_path / "my-gpt"
    log = git(project, "log", "--all", "--format=%an|%ae|%s|%D").splitlines()
    start = 'Start O\'Reilly "net" from its template'
    assert log == [f"Ada Lovelace|ada@here.org|{start}|HEAD -> main"]
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert set(git(project, "ls-files", "-z").rstrip("\0").split("\0")) == set(tree(project))
    assert "100755" in git(project, "ls-files", "-s", "scripts/dev.py")


def test_the_user_s_own_git_settings_sign_the_commit(generate, tmp_path, git):
    write(
        generate.home, ".gitconfig", b"[user]\nname = Me\nemail = me@home\n[commit]\ngpgsign = 1\n"
    )
    try:
        generate(tmp_path, "author=Ada L.")
    finally:
        (generate.home / ".gitconfig").unlink()
    assert git(tmp_path / "my-gpt", "log", "--format=%an <%ae>") == "Me <me@home>\n"


@pytest.fixture
def hostile(generate, git, tmp_path):
    """Settings of git that hide files, run hooks, and refuse line ends."""
    hooks = {"hooks/pre-commit": b"#!/bin/sh\nexit 1\n", "info/exclude": b"*.toml\n"}
    for name, content in hooks.items():
        write(tmp_path, f"of_git/{name}", content).chmod(0o755)
    write(tmp_path, "ignore", b"data/\n*.json\n.gitattributes\n")
    settings = {
        "core.autocrlf": "true",
        "core.excludesFile": tmp_path / "ignore",
        "core.hooksPath": tmp_path / "of_git/hooks",
        "core.safecrlf": "true",
        "init.templateDir": tmp_path / "of_git",
        "user.useConfigOnly": "true",
    }
    generate.home.mkdir(exist_ok=True)
    file = generate.home / ".gitconfig"
    for key, value in settings.items():
        git(tmp_path, "config", "-f", str(file), key, str(value))
    yield
    file.unlink()


@pytest.mark.usefixtures("hostile")
def test_the_first_commit_has_all_files_whatever_git_ignores_for_the_user(
    generate, tmp_path, tree, git
):
    generate(tmp_path)
    project = tmp_path / "my-gpt"
    listed = git(project, "ls-files", "-z").rstrip("\0").split("\0")
    assert set(listed) == set(tree(project))
    assert len(git(project, "log", "--format=%h").splitlines()) == 1


def test_the_first_commit_has_no_file_of_the_user_that_is_ignored(generate, tmp_path, git):
    for name in ("notes.md", ".env", "runs/first/config.yaml"):
        write(tmp_path, f"my-gpt/{name}")
    generate(tmp_path, "-f")
    listed = git(tmp_path / "my-gpt", "ls-files").splitlines()
    assert {"notes.md", "pyproject.toml"} <= set(listed)
    assert not {".env", "runs/first/config.yaml"} & set(listed)


def test_an_author_whom_git_cannot_name_commits_as_the_project(generate, tmp_path, git):
    generate(tmp_path, "author=...")
    assert git(tmp_path / "my-gpt", "log", "--format=%an") == "my-gpt\n"


def test_inside_a_repository_no_second_one_is_made(generate, tmp_path, committed, git):
    write(tmp_path, "outer/x")
    committed(tmp_path / "outer")
    done = generate(tmp_path / "outer")
    assert done.stdout.splitlines()[0].endswith("; in the existing git repository")
    assert not (tmp_path / "outer/my-gpt/.git").exists()
    assert git(tmp_path / "outer", "log", "--format=%s") == "All of it\n"


def test_without_git_init_there_is_no_repository(generate, tmp_path):
    done = generate(tmp_path, "git_init=no")
    assert done.stdout.splitlines()[0].endswith("MIT license")
    assert not (tmp_path / "my-gpt/.git").exists()


def test_without_git_a_project_is_generated_with_a_message(generate, tmp_path, tree, baked):
    write(tmp_path, "bin/x")
    script = f"import os, runpy; os.environ['PATH'] = {str(tmp_path / 'bin')!r}; "
    script += "runpy.run_module('cookiecutter', run_name='__main__', alter_sys=True)"
    write(tmp_path, "without.py", script.encode())
    words = [generate.template, "--no-input", "-o", tmp_path]
    done = generate.run("without", *words, cwd=tmp_path)
    assert done.stdout.splitlines()[0].endswith("; git is not installed, so there is no repository")
    files, expected = tree(tmp_path / "my-gpt"), tree(baked())
    assert json.loads(files.pop(".template.json")[1])["commit"] is None
    del expected[".template.json"]
    assert files == expected


def test_answers_are_stored_for_a_replay_unchanged(generate, tmp_path):
    generate(tmp_path, "git_init=no", 'author=O\'Reilly "net"')
    replay = json.loads((generate.home / "replay/template.json").read_text("utf-8"))
    assert replay["cookiecutter"]["author"] == 'O\'Reilly "net"'
