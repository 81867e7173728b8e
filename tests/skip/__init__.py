"""Tests of torchgpipe.skip."""
