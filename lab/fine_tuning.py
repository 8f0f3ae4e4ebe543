"""Fine-tune an export on conversations with trl and peft, and let it answer.

Export a run; the other programs get an environment of their own:

    lockstep-gpt train run_dir=runs/base
    lockstep-gpt export runs/base --to exports/base
    python3 -m venv fine-tuning
    fine-tuning/bin/pip install torch transformers trl peft
    fine-tuning/bin/python lab/fine_tuning.py exports/base --to exports/tuned

This trains LoRA adapters on fine_tuning.jsonl, adds them to the weights, saves the sum in a new
folder, loads that, and asks it each question of the file. A small model learns the answers by
heart, which is the check: the exit status is 1 if too few are exact. With the quickstart's model
and one thread, this takes about a minute (trl 1.16, peft 0.21, transformers 5.24, torch 2.13).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

CONVERSATIONS = Path(__file__).with_suffix(".jsonl")
# A message is plain text, except the token that ends an answer. `generation` marks what is learned.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}Q: {{ message.content }}\nA:"
    "{% else %}{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
LONGEST_ANSWER = 24  # tokens; more than any answer has


def main() -> int:
    """Train, save, and ask; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("export", type=Path, help="a folder that `lockstep-gpt export` wrote")
    parser.add_argument("--to", type=Path, default=Path("tuned"), help="the new folder")
    parser.add_argument("--data", type=Path, default=CONVERSATIONS, help="JSON lines: messages")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.9, help="of exact answers, at least")
    options = parser.parse_args()
    lines = options.data.read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    fine_tune(options.export, options.to, conversations, options.steps)
    right = ask(options.to, conversations)
    count = len(conversations)
    print(f"{right} of {count} answers are exact; at least {options.share:.0%} must be")
    return int(right < options.share * count)


def load(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model in a folder; a modern GPT brings its code with it."""
    # In a conversation, `<|endoftext|>` must be the token, not its characters.
    special = {"split_special_tokens": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, **special)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def fine_tune(source: Path, target: Path, conversations: list[Any], steps: int) -> None:
    """Train adapters on the answers, and save the model with them added to its weights."""
    tokenizer, model = load(source)
    tokenizer.chat_template = TEMPLATE
    longest = max(map(len, tokenizer.apply_chat_template(conversations, return_dict=False)))
    if longest > tokenizer.model_max_length:
        context = tokenizer.model_max_length
        sys.exit(f"a conversation has {longest} tokens, and the model's context is {context}")
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(target),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            assistant_only_loss=True,
            max_length=longest,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            logging_steps=50,
        ),
        train_dataset=Dataset.from_list([{"messages": each} for each in conversations]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(target)
    tokenizer.save_pretrained(target)


def ask(folder: Path, conversations: list[Any]) -> int:
    """Print each question with the model's answer; return how many answers are exact."""
    tokenizer, model = load(folder)
    right = 0
    for question, answer in conversations:
        text = tokenizer.apply_chat_template([question], tokenize=False)
        prompt = tokenizer(text, return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        new = ids[0, prompt["input_ids"].shape[1] :]
        said = tokenizer.decode(new, skip_special_tokens=True).strip()
        right += said == answer["content"]
        print(f"{question['content']:32} {said}")
    return right


if __name__ == "__main__":
    sys.exit(main())
