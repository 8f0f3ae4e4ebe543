import pytest
from lockstep_gpt.generate import main

from lockstep import commands as cli
from lockstep.checkpoints.reading import find_checkpoint, read_checkpoint, write_checkpoint
from lockstep.errors import UserError
from lockstep.tokens.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def run(saved_run):
    return saved_run(ByteTokenizer(), source="stdlib")


@pytest.fixture
def text(run, capsys):
    """Return the output for a prompt, with flags."""

    def generate(*flags, prompt="def f(x", length=40):
        words = [str(run), "--prompt", prompt, "--length", str(length), *flags]
        assert main(words) == 0
        return capsys.readouterr().out

    return generate


def test_the_same_seed_gives_the_same_text_and_another_seed_another(text):
    assert text() == text("--seed", "1337") != text("--seed", "7")


def test_the_prompt_is_continued(text):
    assert text(prompt="größer (\u201ca\u201d)", length=5).startswith("größer (\u201ca\u201d)")


def test_temperature_zero_has_one_answer(text):
    greedy = text("--temperature", "0")
    assert (
        text("--temperature", "0", "--seed", "7") == greedy == text("--top-k", "1", "--seed", "7")
    )


def test_a_checkpoint_s_path_means_the_same_as_its_run(run, text, capsys):
    expected = text()
    path = run / "checkpoints" / "step=000001.ckpt"
    assert main([str(path), "--prompt", "def f(x", "--length", "40"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("prompt", ""),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("top-k", "0"),
        ("top-k", "x"),
        ("length", "0"),
        ("seed", str(2**70)),
    ],
)
def test_an_invalid_value_is_rejected_with_its_flag(run, capsys, flag, value):
    try:
        status = cli.main(["generate", str(run), f"--{flag}={value}"])
    except SystemExit as end:  # errors of the parser itself
        status = end.code
    assert status == 2
    assert flag.replace("-", "") in capsys.readouterr().err.replace("-", "").replace("_", "")


def test_a_missing_run_is_rejected(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        main([str(tmp_path / "nowhere")])


MUTE = """
from lockstep_gpt.gpt import GPT


class Mute(GPT):
    generate = property()
"""


def test_a_model_that_can_not_continue_text_is_refused_in_one_line(run, tmp_path, monkeypatch):
    (tmp_path / "mute.py").write_text(MUTE)
    monkeypatch.syspath_prepend(tmp_path)
    path = find_checkpoint(run)
    content = read_checkpoint(path)
    content["config"]["model"]["_target_"] = "mute.Mute"
    write_checkpoint(content, tmp_path / path.name)
    with pytest.raises(UserError, match=r"^Mute has no method generate, which continues tokens"):
        main([str(tmp_path / path.name), "--trust"])
