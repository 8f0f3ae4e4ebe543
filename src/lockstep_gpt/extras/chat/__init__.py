"""Conversations: fine-tunes a model on them, talks to it, and serves it."""

# name -> target, help line, whether it accepts Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "chat": (".extras.chat.terminal:main", "talk to a model in the terminal", False),
    "serve": (".extras.chat.serving:main", "answer over HTTP, like OpenAI's API", False),
}
SETTINGS = {"model": ".extras.chat.chat_settings:AdaptedModel"}
# `${initial:NAME}` in configurations.
WORDS = ".extras.chat.initial:with_initial"
# Adapters, if `model.lora_rank` is set; the plain model with the same weights.
MODEL = ".extras.chat.lora:adapt"
MERGE = ".extras.chat.lora:merge"
CHECK = ".extras.chat.chat_settings:refuse"
# Its template in an export.
EXPORT_FILES = ".extras.chat.export_files:chat_files"
