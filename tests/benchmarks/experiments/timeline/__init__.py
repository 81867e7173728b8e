"""Tests of benchmarks.experiments.timeline."""
