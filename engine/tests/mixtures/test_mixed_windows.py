"""The windows of a mixture are those of its sources."""

import numpy as np
import pytest

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.sources.text import Text
from lockstep.tokens.windows import StreamWindows

TEXT = f"{Text.__module__}.{Text.__name__}"
T = 16


@pytest.mark.parametrize("split", ["train", "val"])
def test_windows_are_those_of_the_sources_one_after_another(split, corpora, single):
    windows = StreamWindows(prepare(corpora()), split, T)
    of_sources = [
        StreamWindows(prepare(single(name)), split, T) for name in ("code", "poems", "prose")
    ]
    expected = np.concatenate([source[np.arange(*source.counts.values())] for source in of_sources])
    assert [*windows.counts.values()] == [source.counts[""] for source in of_sources]
    rows = np.random.default_rng(0).permutation(len(expected))
    assert np.array_equal(windows[rows], expected[rows])


@pytest.mark.slow
def test_sources_may_have_several_files(corpora, tmp_path, single):
    text = np.random.default_rng(0).choice([*"abcdef "], 3_000_000)
    (tmp_path / "long").write_text("".join(text))
    long = {"path": str(tmp_path / "long"), "shard_mb": 1, "val_fraction": 0.2}
    data = corpora("code", sources={"long": long}, weights={"code": 1.0, "long": 1.0})
    folder = prepare(data)
    assert len([*folder.glob("long-train-*.bin")]) == 3
    windows, code = StreamWindows(folder, "train", T), prepare(single("code"))
    alone = StreamWindows(prepare(data.make_sources()["long"]), "train", T)
    first = StreamWindows(code, "train", T).counts[""]
    rows = np.arange(0, alone.counts[""], 97)
    assert np.array_equal(windows[first + rows], alone[rows])


def test_a_file_of_another_size_is_rejected(corpora):
    folder = prepare(corpora("code prose"))
    with (folder / "code-train-00000.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"has 24,00[0-9] bytes, but its index says"):
        StreamWindows(folder, "train", T)
