"""Tests of torchgpipe.balance."""
