"""Tests of torchgpipe.base."""
