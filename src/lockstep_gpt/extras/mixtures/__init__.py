"""Several corpora at once: each with a share of the tokens, or a number of epochs."""

SOURCES = {
    "mixture": (".extras.mixtures.mixture_settings:MixtureData", ".extras.mixtures.mixing:Mixture")
}
WORDS = ".extras.mixtures.mixture_settings:with_sources"
OTHER_NAME = ".extras.mixtures.mixture_settings:right_name"
WINDOWS = ".extras.mixtures.mixed_windows:opened"
DATA_MODULE = ".extras.mixtures.mixed_data:data_module"
CALLBACK = ".extras.mixtures.by_source:callback"
RECEIPT = ".extras.mixtures.by_source:lines"
ADVISE = ".extras.mixtures.by_source:advise"
