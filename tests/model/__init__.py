"""Tests of torchgpipe.model."""
