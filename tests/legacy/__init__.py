"""Tests of torchgpipe.legacy."""
