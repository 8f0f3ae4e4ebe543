"""Settings of the kernels of a CPU."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import Checked, setting

PRODUCTS = ("blas", "onednn")
ATTENTION = ("plain", "fused")
NEWTON_SCHULZ = ("bfloat16", "float32", "gram")


@dataclass
class KernelConfig(Checked):
    """What computes on a CPU; what is null is decided when the run starts, and then stays."""

    node: ClassVar[str] = "kernels"
    # Presets of new runs set it. A run that an earlier version began keeps what the rules gave it.
    measure: bool = setting(
        "decide what is null by measuring for half a second; false, or with "
        "batch.exact_micro_size: by rules",
        False,
    )
    products: str | None = setting(
        "float32 matrix products: blas, which is often MKL, or onednn", None, choices=PRODUCTS
    )
    attention: str | None = setting(
        "attention: plain matrix products, or torch's fused kernel", None, choices=ATTENTION
    )
    newton_schulz: str | None = setting(
        "Muon's matrix products: in bfloat16 or float32; gram: float32, with fewer operations for "
        "matrices that are not square",
        None,
        choices=NEWTON_SCHULZ,
    )
    threads: int | None = setting(
        "threads per rank, instead of OMP_NUM_THREADS or a share of the cores",
        None,
        at_least=1,
        at_most=4096,
    )
