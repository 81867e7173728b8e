"""Tests of benchmarks.experiments."""
