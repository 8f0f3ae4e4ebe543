"""Several sources at once, documents that do not see each other, and windows of whole documents.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.mixtures.by_source import BySource
    from lockstep.mixtures.mask import MaskDocuments, mask_documents

__all__ = [
    "BySource",
    "MaskDocuments",
    "mask_documents",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "BySource": "lockstep.mixtures.by_source:BySource",
        "MaskDocuments": "lockstep.mixtures.mask:MaskDocuments",
        "mask_documents": "lockstep.mixtures.mask:mask_documents",
    },
)
