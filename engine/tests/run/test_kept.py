import pytest

from lockstep.errors import UserError
from lockstep.run.kept import refuse_other_experiment

KEPT = ("seed", "model", "batch.global_size", "data.fingerprint", "callbacks.documents._target_")
VALUES = {
    "seed": 1,
    "max_steps": 10,
    "batch": {"global_size": 4},
    "model": {"block_size": 8, "n_layer": 1, "n_kv_head": None},
    "data": {"root": "data", "fingerprint": None},
    "optim": {"lr": 1e-8},
    "callbacks": {},
}


def test_a_run_keeps_its_settings_and_lists_differences():
    refuse_other_experiment("the run", VALUES, VALUES, KEPT)
    free = {**VALUES, "max_steps": 99, "optim": {"lr": 1.0}}
    refuse_other_experiment("the run", VALUES, {**free, "data": {"root": "x"}}, KEPT)
    other = {**VALUES, "seed": 2, "batch": {"global_size": 8}, "model": {"n_layer": 2}}
    with pytest.raises(UserError) as refused:
        refuse_other_experiment("the run", VALUES, other, KEPT)
    assert str(refused.value) == (
        "the run keeps its settings, but got seed=2 instead of 1, batch.global_size=8 instead of "
        "4, model.block_size=null instead of 8 and 1 more; use the same, or set resume_force=true"
    )


def test_a_setting_that_was_null_may_be_decided_later():
    decided = {**VALUES, "data": {"root": "data", "fingerprint": "ab" * 32}}
    refuse_other_experiment("the run", VALUES, decided, KEPT)
    with pytest.raises(UserError, match=r"data\.fingerprint=null instead of abab"):
        refuse_other_experiment("the run", decided, VALUES, KEPT)


def test_the_arguments_of_a_kept_group_and_callbacks_are_decided():
    other = {**VALUES, "model": {**VALUES["model"], "n_kv_head": 2}}
    with pytest.raises(UserError, match=r"got model\.n_kv_head=2 instead of null"):
        refuse_other_experiment("the run", VALUES, other, KEPT)
    other = {**VALUES, "callbacks": {"documents": {"_target_": "my.Mask"}}}
    with pytest.raises(UserError, match=r"got callbacks\.documents\._target_=my\.Mask instead of"):
        refuse_other_experiment("the run", VALUES, other, KEPT)


def test_a_new_argument_with_its_default_leaves_a_run_as_it_was():
    old = {**VALUES, "model": {"_target_": "torch.nn.Dropout", "inplace": False}}
    new = {**old, "model": {**old["model"], "p": 0.5}}  # Dropout's default
    refuse_other_experiment("the run", old, new, KEPT)
    refuse_other_experiment("the run", new, old, KEPT)
    new["model"]["p"] = 0.1
    with pytest.raises(UserError, match=r"got model\.p=0\.1 instead of null"):
        refuse_other_experiment("the run", old, new, KEPT)
    new = {**VALUES, "model": {"_target_": "torch.nn.Dropout1d", "inplace": False, "p": 0.5}}
    with pytest.raises(UserError, match=r"model\._target_=torch\.nn\.Dropout1d instead of"):
        refuse_other_experiment("the run", old, new, KEPT)


def test_a_checkpoint_of_a_run_names_how_to_continue_that_run(tmp_path):
    (tmp_path / "config.yaml").touch()
    where = f"resume={tmp_path}/checkpoints/step=000010.ckpt"
    remedy = f"; to continue the run itself: run_dir={tmp_path} resume=auto"
    with pytest.raises(UserError) as refused:
        refuse_other_experiment(where, VALUES, {**VALUES, "seed": 2}, KEPT)
    assert str(refused.value).endswith(remedy)
