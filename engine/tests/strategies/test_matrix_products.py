"""Which library multiplies float32 matrices: an exact one, and the same on all ranks."""

import pytest
import torch

from lockstep.strategies import matrix_products
from lockstep.strategies.matrix_products import (
    EXACT_ENOUGH,
    choose_matrix_products,
    product_error,
    restored_afterward,
)


@pytest.fixture(autouse=True)
def own_products():
    """Leave the process as it was."""
    with restored_afterward():
        yield


def test_the_products_of_a_cpu_are_accurate_and_named():
    assert choose_matrix_products("cpu") in ("oneDNN", "MKL", "BLAS")
    assert product_error() < EXACT_ENOUGH


@pytest.mark.parametrize(("device", "name"), [("cuda", "TF32"), ("mps", "Metal")])
def test_those_of_a_gpu_are_named(device, name):
    assert choose_matrix_products(device) == name
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(
    ("exact_ranks", "names"), [({0, 1}, {"oneDNN"}), ({0}, {"MKL", "BLAS"}), ({1}, {"MKL", "BLAS"})]
)
def test_all_ranks_use_one_library_which_is_exact_on_each(on_ranks, exact_ranks, names):
    def rank(number):
        matrix_products.onednn_is_exact = lambda: number in exact_ranks
        return choose_matrix_products("cpu"), torch.get_float32_matmul_precision()

    chosen = on_ranks(2, rank)
    assert chosen[0] == chosen[1]
    assert chosen[0][0] in names
