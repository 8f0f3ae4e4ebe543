"""More places that training text comes from: Parquet files, the Hub, files of token ids."""

# data.source -> its settings, the corpus; `config.py` and `data/corpora.py` collect them.
SOURCES = {
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
