"""`data=prepared`: a prepared folder at a URL is copied here, through faults and kills."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.sealed_json import write_sealed
from lockstep_gpt.data.shards import INDEX, check_content, load_index, open_split
from lockstep_gpt.data.sources import prepared
from lockstep_gpt.data.sources.prepared import PreparedFolder
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.errors import UserError

SPLITS = ("train", "val", "test")
PREPARE = """
import sys
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.sources.prepared import PreparedFolder
print(prepare(PreparedFolder(root=sys.argv[1], path=sys.argv[2])))
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A prepared folder with three token files for training."""
    folder = tmp_path_factory.mktemp("there")
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for number in range(30):
        text = bytes(rng.integers(97, 123, size=100_000, dtype=np.uint8))
        (folder / "texts" / f"{number:02}.txt").write_bytes(text)
    settings = {"val_fraction": 0.1, "test_fraction": 0.1, "shard_mb": 1}
    return prepare(Text(root=str(folder / "data"), path=str(folder / "texts"), **settings))


@pytest.fixture
def here(tmp_path):
    """A function that gives the settings for a URL."""
    return lambda url: PreparedFolder(root=str(tmp_path / "here"), path=str(url))


@pytest.fixture
def copy(there, tmp_path):
    """A copy of the folder, to damage."""
    return Path(shutil.copytree(there, tmp_path / "copy"))


def change_index(folder, **changes):
    values = json.loads((folder / INDEX).read_bytes())
    del values["sha256"]
    write_sealed(folder / INDEX, {**values, **changes})


def assert_equal(folder, other):
    for split in SPLITS:
        np.testing.assert_array_equal(open_split(folder, split), open_split(other, split))
    index, expected = load_index(folder), load_index(other)
    assert index.tokenizer == expected.tokenizer
    for split in SPLITS:
        for name in ("tokens", "documents", "text_bytes", "shards"):
            assert getattr(index.splits[split], name) == getattr(expected.splits[split], name)
    check_content(folder, index)


@pytest.mark.parametrize("parts", [True, False])
def test_the_copy_has_the_folder_s_tokens_through_cuts_and_failures(serving, there, here, parts):
    assert len(load_index(there).splits["train"].shards) == 3
    with serving(there, parts=parts) as (url, faults):
        config = here(url)
        assert config.has_test
        faults.cuts = [0, 70_000, 500_000]
        faults.failures = 2 * int(parts)
        folder = prepare(config)
        assert not faults.cuts
        sent = dict(faults.sent)
        assert prepare(here(url)) == folder
        fetched = [name for name in faults.sent if faults.sent[name] != sent[name]]
        assert fetched == [INDEX]
    assert_equal(folder, there)


def test_a_folder_in_memory_or_on_another_disk_is_copied(there, here):
    fsspec.filesystem("memory").put(f"{there}/", "/prepared-there/", recursive=True)
    folder = prepare(here("memory://prepared-there"))
    assert_equal(folder, there)
    assert prepare(here(there)) == folder


def test_a_killed_prepare_continues(serving, there, here, tmp_path):
    size = sum(path.stat().st_size for path in there.glob("*.bin"))
    with serving(there, pause=0.05) as (url, _):
        command = [sys.executable, "-c", PREPARE, str(tmp_path / "here"), url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        unfinished = tmp_path / "here"
        while process.poll() is None:  # killed as soon as one file is here
            if len([*unfinished.glob(".*.unfinished/*.bin")]) > 3:
                process.send_signal(signal.SIGKILL)
                break
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        (first,) = unfinished.glob(".*.unfinished/train-00000.bin")
        start = (there / "train-00000.bin").read_bytes()[:700_000]
        first.write_bytes(start)  # the kill was in the middle of it
    # Another server: the first may still answer requests of the killed process, which don't count.
    with serving(there) as (url, faults):
        folder = prepare(here(url))
        assert sum(faults.sent[name] for name in faults.sent if name != INDEX) < size - 600_000
    assert_equal(folder, there)


def test_a_damaged_start_of_a_file_is_fetched_again(serving, there, here, tmp_path):
    with serving(there) as (url, faults):
        faults.cuts = [None, *[0] * 40]
        with pytest.raises(UserError, match=r"\.bin cannot be read: .*not completed"):
            prepare(here(url))
        faults.cuts = []
        (unfinished,) = (tmp_path / "here").glob(".*.unfinished")
        (unfinished / "train-00001.bin").write_bytes(b"damaged")
        folder = prepare(here(url))
    assert_equal(folder, there)


def test_a_file_that_does_not_match_its_hash_is_one_clear_line(copy, here):
    path = copy / "val-00000.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    line = rf"{path} does not match its SHA-256; copy the folder there again"
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        prepare(here(copy))


def test_what_is_missing_or_truncated_is_one_clear_line(copy, here):
    (copy / "val-00000.bin").unlink()
    with pytest.raises(UserError, match=r"val-00000\.bin cannot be read: No such file"):
        prepare(here(copy))
    (copy / "val-00000.bin").write_bytes(b"a")
    with pytest.raises(UserError, match=r"val-00000\.bin has 1 bytes, not [\d,]+; copy the folder"):
        prepare(here(copy))
    (copy / INDEX).write_text("{}")
    with pytest.raises(UserError, match=r"index\.json is damaged; copy the folder there again"):
        prepare(here(copy))
    (copy / INDEX).unlink()
    with pytest.raises(UserError, match=r"index\.json cannot be read: No such file"):
        prepare(here(copy))
    with pytest.raises(UserError, match=r"data\.path is empty; set it to the URL"):
        prepare(here(""))


def test_an_index_cannot_name_files_elsewhere(copy, here):
    splits = json.loads((copy / INDEX).read_bytes())["splits"]
    splits["val"]["shards"][0]["file"] = "../../val-00000.bin"
    change_index(copy, splits=splits)
    with pytest.raises(UserError, match=r"names the file '\.\./\.\./val-00000\.bin'"):
        prepare(here(copy))


def test_what_tokens_alone_would_not_train_equally_is_refused(copy, here):
    settings = load_index(copy).settings
    change_index(copy, settings={**settings, "source": "unknown"})
    with pytest.raises(UserError, match="prepared by data=unknown, which this project lacks"):
        prepare(here(copy))
    splits = json.loads((copy / INDEX).read_bytes())["splits"]
    change_index(copy, settings=settings, splits={**splits, "code/train": splits["train"]})
    with pytest.raises(UserError, match=r"holds a mixture; .* data\.sources\.NAME=prepared"):
        prepare(here(copy))


def test_a_copy_of_a_copy_is_the_same_data(there, here, tmp_path):
    first = prepare(here(there))
    second = prepare(PreparedFolder(root=str(tmp_path / "second"), path=str(first)))
    assert_equal(second, there)
    assert load_index(second).settings["held_out"] == load_index(there).settings["held_out"]


@pytest.mark.parametrize("setting", prepared.OF_TEXT)
def test_a_setting_that_was_used_long_ago_is_refused(setting):
    value = 7 if setting == "shard_mb" else 0.3
    with pytest.raises(UserError, match=rf"data\.{setting}={value} has no effect on tokens"):
        PreparedFolder(path="x", **{setting: value})


def test_a_root_at_a_url_is_refused_with_what_to_do():
    with pytest.raises(UserError, match=r"data\.root=s3://b is a URL, .* data=prepared"):
        PreparedFolder(path="x", root="s3://b")
