"""Several sources at once, documents that do not see each other, and windows of whole documents."""

SETTINGS = {"documents": ".extras.datasets.mask_settings:DocumentSettings"}
CHECK = ".extras.datasets.mask_settings:refuse_impossible"
ARGUMENTS = ".extras.datasets.mixture:with_sources"
CALLBACKS = ".extras.datasets.by_source:callbacks"
MODEL = ".extras.datasets.mask:mask_documents"
