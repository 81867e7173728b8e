"""A trainer of GPTs, as a command: ``torchgpipe-train-gpt``."""
