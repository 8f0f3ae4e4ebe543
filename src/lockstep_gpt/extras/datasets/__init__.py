"""Several corpora at once, documents that do not see each other, and windows of whole documents."""

# Group of settings -> its class with this extra.
SETTINGS = {"model": ".extras.datasets.mask_settings:MaskedModel"}
WORDS = ".extras.datasets.mixture:with_sources"
OTHER_NAME = ".extras.datasets.mixture:right_name"
CALLBACK = ".extras.datasets.by_source:callback"
RECEIPT = ".extras.datasets.by_source:lines"
ADVISE = ".extras.datasets.by_source:advise"
MODEL = ".extras.datasets.mask:mask_documents"
