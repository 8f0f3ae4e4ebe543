"""Documents that do not see each other, and windows that are packed from whole documents."""

# Group of settings -> its class with this extra.
SETTINGS = {
    "data": ".extras.documents.documents_settings:PackedData",
    "model": ".extras.documents.documents_settings:MaskedModel",
}
# Settings of `data` that do not change the prepared tokens.
NOT_TOKENS = ("packing",)
CHECK = ".extras.documents.documents_settings:refuse_processes"
PREPARED = ".extras.documents.packing:pack_if_asked"
DATA_MODULE = ".extras.documents.packed_windows:data_module"
# Of the sources of a mixture, each packed by itself.
WINDOWS_OF_SOURCES = ".extras.documents.packed_windows:windows_of_sources"
RECEIPT = ".extras.documents.packing:receipt_line"
MODEL = ".extras.documents.mask:mask_documents"
# Normalizes the loss by the number of targets that count.
CALLBACK = ".extras.documents.counted_targets:counted_targets"
