"""The engine: takes micro-batches through partitions, and lays the way back."""
