"""Tests of the models of the benchmarks: sizes to the digit, and numbers of references."""
