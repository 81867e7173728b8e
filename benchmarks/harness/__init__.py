"""The harness: what experiments share, from options to tables and pictures."""
