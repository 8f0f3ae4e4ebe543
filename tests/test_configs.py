"""Each choice in configs/ composes, and names classes and arguments that exist."""

import pytest
from lockstep.testing import assert_composes, choices

from lockstep_gpt import CONFIGS


@pytest.mark.parametrize("choice", choices(CONFIGS))
def test_each_choice_composes(choice):
    assert_composes(CONFIGS, choice)
