"""Training: one step by a schedule, and the loss of a mini-batch."""
