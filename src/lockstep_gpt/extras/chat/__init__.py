"""Conversations: fine-tunes a model on them, talks to it, and serves it."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "chat": Command(".extras.chat.terminal:main", "talk to a model in the terminal", False),
    "serve": Command(".extras.chat.serving:main", "answer over HTTP, like OpenAI's API", False),
}
SETTINGS = {"lora": ".extras.chat.lora_settings:LoraSettings"}
ARGUMENTS = ".extras.chat.initial:with_initial"
CHECK = ".extras.chat.lora_settings:refuse_impossible"
MODEL = ".extras.chat.lora:adapt"
