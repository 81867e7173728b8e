"""Tests of torchgpipe.engine.checkpoint."""
