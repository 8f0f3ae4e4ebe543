"""A private name of lightning-utilities, with the reason. Versions: 0.15.

It must not import Lightning, whose import it makes faster.
"""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_transformers() -> Iterator[None]:
    """Keep torchmetrics from importing transformers, if it is installed: that takes a second.

    torchmetrics imports it for two metrics; these are left out of `torchmetrics.text`, as if it
    were not installed. `from torchmetrics.text.bert import BERTScore` still imports it.
    """
    from lightning_utilities.core.imports import RequirementCache

    check = RequirementCache._check_available
    denied = []

    def denying(cache: RequirementCache) -> None:
        check(cache)
        if str(cache.requirement).startswith("transformers") and cache.available:
            cache.available = False
            denied.append(cache)

    RequirementCache._check_available = denying  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        RequirementCache._check_available = check  # type: ignore[method-assign]
        for cache in denied:
            del cache.available  # looked up again at the next access
        names = [name for name in sys.modules if name.startswith("torchmetrics.")]
        for name in names:  # modules imported without it are imported again on demand
            values = {id(value) for value in vars(sys.modules[name]).values()}
            is_package = hasattr(sys.modules[name], "__path__")
            if not is_package and values & {id(cache) for cache in denied}:
                del sys.modules[name]
