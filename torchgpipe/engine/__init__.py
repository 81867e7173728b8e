"""The engine: execution of micro-batches in partitions, forward and backward."""
