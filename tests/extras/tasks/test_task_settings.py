"""Settings of the callback that can't work."""

import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.during import Tasks


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("every=0", "callbacks.tasks.every=0 must be a whole number of at least 1"),
        ("every=x", "callbacks.tasks.every=x must be a whole number of at least 1"),
        ("share=0", "callbacks.tasks.share=0 must be above 0 and at most 1, or null for no limit"),
        ("share=2%", "callbacks.tasks.share=2% must be above 0 and at most 1, or null"),
        ("files=[]", "callbacks.tasks.files=[] must be a list; for example [builtin]"),
        ("files=x.jsonl", "callbacks.tasks.files=x.jsonl must be a list; for example [builtin]"),
        ("files=[x.jsonl]", "x.jsonl cannot be read: No such file or directory; name a task file"),
        ("evry=1", "evry"),
    ],
)
def test_a_bad_setting_is_one_line_before_anything_is_created(command, setting, message):
    words = ("callbacks=[default,tasks]", f"callbacks.tasks.{setting}", "run_dir=run")
    err = command(*command.smoke(*words), status=2).stderr
    assert message in err
    assert "Traceback" not in err
    assert not (command.folder / "run").exists()


def test_the_constructor_refuses_the_same():
    with pytest.raises(UserError, match=r"callbacks.tasks.every=0 must be a whole number"):
        Tasks(every=0)
