"""Tests of the benchmarks: they run, and say what is wrong with an option in one line."""
