"""Sources of text, tokenizers, tokens that are prepared once, and the windows that a model reads.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.tokens.prepared import Packing, Prepared
    from lockstep.tokens.sampling import check_sampling, continued, evaluating, prompt_of
    from lockstep.tokens.sources.source import Source
    from lockstep.tokens.sources.text import Text
    from lockstep.tokens.tokenizer import GrowingText, Tokenizer, printable
    from lockstep.tokens.tokenizer_choice import encode_alike, saved_tokenizer
    from lockstep.tokens.windows import Batch, Stored, move_to_device, read_windows

__all__ = [
    "Batch",
    "GrowingText",
    "Packing",
    "Prepared",
    "Source",
    "Stored",
    "Text",
    "Tokenizer",
    "check_sampling",
    "continued",
    "encode_alike",
    "evaluating",
    "move_to_device",
    "printable",
    "prompt_of",
    "read_windows",
    "saved_tokenizer",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Batch": "lockstep.tokens.windows:Batch",
        "GrowingText": "lockstep.tokens.tokenizer:GrowingText",
        "Packing": "lockstep.tokens.prepared:Packing",
        "Prepared": "lockstep.tokens.prepared:Prepared",
        "Source": "lockstep.tokens.sources.source:Source",
        "Stored": "lockstep.tokens.windows:Stored",
        "Text": "lockstep.tokens.sources.text:Text",
        "Tokenizer": "lockstep.tokens.tokenizer:Tokenizer",
        "check_sampling": "lockstep.tokens.sampling:check_sampling",
        "continued": "lockstep.tokens.sampling:continued",
        "encode_alike": "lockstep.tokens.tokenizer_choice:encode_alike",
        "evaluating": "lockstep.tokens.sampling:evaluating",
        "move_to_device": "lockstep.tokens.windows:move_to_device",
        "printable": "lockstep.tokens.tokenizer:printable",
        "prompt_of": "lockstep.tokens.sampling:prompt_of",
        "read_windows": "lockstep.tokens.windows:read_windows",
        "saved_tokenizer": "lockstep.tokens.tokenizer_choice:saved_tokenizer",
    },
)
