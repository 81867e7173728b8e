"""Tests of torchgpipe.engine."""
