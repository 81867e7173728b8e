"""Tests of benchmarks.accuracy."""
