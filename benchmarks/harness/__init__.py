"""The harness that experiments share, from options to tables and pictures."""
