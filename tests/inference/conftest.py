"""Tests of inference use tiny models."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Run tests of tiny tensors on one thread; a second core may be busy with other work."""
    torch.set_num_threads(1)
