"""Tests of the benchmarks: they run, and report an invalid option in one line."""
