"""Train a GPT on every device there is; the number of devices changes only the speed."""
