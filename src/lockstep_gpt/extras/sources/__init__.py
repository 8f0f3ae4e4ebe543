"""More sources of training text, corpora of many files, and builds that resume after a kill."""

# data.source -> its settings, its corpus; `config.py` and `data/corpora.py` collect them.
SOURCES = {
    "stdlib": (".extras.sources.text:StdlibData", ".extras.sources.text:StandardLibrary"),
    "text": (".extras.sources.text:TextData", ".extras.sources.text:OwnText"),
    "jsonl": (".extras.sources.text:JsonlData", ".extras.sources.text:JsonLines"),
    "synthetic": (".extras.sources.numbers:SyntheticData", ".extras.sources.numbers:RandomTokens"),
    "parquet": (".extras.sources.parquet:ParquetData", ".extras.sources.parquet:ParquetFiles"),
    "shards": (".extras.sources.token_files:ShardsData", ".extras.sources.token_files:TokenFiles"),
    "huggingface": (
        ".extras.sources.huggingface:HuggingfaceData",
        ".extras.sources.huggingface:HuggingfaceRows",
    ),
}
# Loader processes.
DATA_MODULE = ".extras.sources.workers:data_module"
CHECK = ".extras.sources.shared_memory:refuse_missing"
TOKENIZERS = {
    "bpe": ".extras.sources.byte_pairs:BytePairTokenizer",
    "numbers": ".extras.sources.numbers:from_dict",
}
BUILD = ".extras.sources.build:write"
JOINED_FILES = ".extras.sources.joined:joined"
