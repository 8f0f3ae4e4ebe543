"""More places that training text comes from, many files, and builds that go on after a kill."""

# data.source -> its settings, the corpus; `config.py` and `data/corpora.py` collect them.
SOURCES = {
    "stdlib": (
        "lockstep_gpt.extras.sources.text:StdlibData",
        "lockstep_gpt.extras.sources.text:StandardLibrary",
    ),
    "text": (
        "lockstep_gpt.extras.sources.text:TextData",
        "lockstep_gpt.extras.sources.text:OwnText",
    ),
    "jsonl": (
        "lockstep_gpt.extras.sources.text:JsonlData",
        "lockstep_gpt.extras.sources.text:JsonLines",
    ),
    "synthetic": (
        "lockstep_gpt.config:SyntheticData",
        "lockstep_gpt.extras.sources.blocks:RandomTokens",
    ),
    "parquet": (
        "lockstep_gpt.extras.sources.parquet:ParquetData",
        "lockstep_gpt.extras.sources.parquet:ParquetFiles",
    ),
    "shards": (
        "lockstep_gpt.extras.sources.token_files:ShardsData",
        "lockstep_gpt.extras.sources.token_files:TokenFiles",
    ),
    "huggingface": (
        "lockstep_gpt.extras.sources.huggingface:HuggingfaceData",
        "lockstep_gpt.extras.sources.huggingface:HuggingfaceRows",
    ),
}
BUILD = "lockstep_gpt.extras.sources.build:write"
JOINED_FILES = "lockstep_gpt.extras.sources.joined:joined"
