"""Tests of benchmarks.experiments.accuracy."""
