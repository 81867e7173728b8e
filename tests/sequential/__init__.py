"""Tests of torchgpipe.sequential."""
