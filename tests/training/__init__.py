"""Tests of torchgpipe.training."""
