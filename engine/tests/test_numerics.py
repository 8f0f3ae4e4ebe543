"""`lockstep.NUMERICS`: a fixed run has fixed bits, and it goes on under its own numerics only."""

import hashlib
import platform

import numpy as np
import pytest
import torch

from lockstep import NUMERICS
from lockstep.callbacks import arithmetic
from lockstep.loading.order import Shuffled
from lockstep.versions import VERSION

TEXT = "".join(f"{number} squared is {number**2}.\n" for number in range(2000))
WORDS = ("batch.exact_micro_size=2", "max_steps=10", "val_tokens=512", "callbacks=[]")
ORDER = "8d762e488a4ed5098cae07967749e0c1836cd0cdc63f4a9bd6d80472d685c5a0"
# optimizer -> the weights after ten steps, which these versions of torch have in common.
BITS = {
    "adamw": "3a30ec6f350001aa4486514aa1e85dfad91a1fd9f1980bdc90551a5704beba0c",
    "muon": "8192247e498523e4d596490478ce443a9c1d07ebc923caaed158a16ffd70cfd4",
}
# Numerics, torch, and the CPU's instructions. If hashes change on the same torch and CPU, raise
# NUMERICS.
WEIGHTS = {
    (1, "2.12.0", "x86_64 AVX512"): BITS,
    (1, "2.13.0", "x86_64 AVX512"): BITS,
    (1, "2.14.1", "x86_64 AVX512"): BITS,
    (1, "2.15.0", "x86_64 AVX512"): BITS,
}
HERE = (
    NUMERICS,
    torch.__version__.partition("+")[0],
    f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
)


def test_the_order_of_samples_is_that_of_its_numerics():
    samples = Shuffled(1000, seed=1337)(np.arange(2500))  # of two and a half epochs
    assert hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest() == ORDER


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_fixed_run_has_the_bits_of_its_numerics(command, optimizer):
    if HERE not in WEIGHTS:
        pytest.skip(f"no hash is stored for {HERE}, whose kernels may round otherwise")
    (command.folder / "text.txt").write_text(TEXT)
    words = ["data=text", "data.source.path=text.txt", f"optim={optimizer}", *WORDS]
    command.train(*words, "run_dir=run")
    assert command.summary("run")["weights"]["10"] == WEIGHTS[HERE][optimizer]


@pytest.mark.slow
def test_a_run_goes_on_with_other_numerics_only_by_force(command, monkeypatch):
    command.train(*WORDS, "max_steps=2", "run_dir=run")
    monkeypatch.setattr(arithmetic, "NUMERICS", NUMERICS + 1)
    longer = [*WORDS, "max_steps=3", "run_dir=run", "resume=auto"]
    error = command.train(*longer, status=2).stderr
    assert error.rstrip("\n").endswith(
        f"the state was computed by lockstep {VERSION} with numerics {NUMERICS}, and lockstep "
        f"{VERSION} has numerics {NUMERICS + 1}, so the run would go on with other bits; install "
        "that version, or set resume_force=true"
    )
    command.train(*longer, "resume_force=true")
