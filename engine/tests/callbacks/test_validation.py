"""When validations follow: limits of the Trainer that name none."""

import lightning
import pytest

from lockstep.callbacks.validation import ValidateEvery
from lockstep.errors import UserError


@pytest.mark.parametrize("steps", [None, 3])
def test_no_validation_follows_every_zeroth_epoch(steps):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, check_val_every_n_epoch=0)
    line = r"^check_val_every_n_epoch=0 must be at least 1$"
    with pytest.raises(UserError, match=line):
        ValidateEvery(steps).setup(trainer, None, "fit")
