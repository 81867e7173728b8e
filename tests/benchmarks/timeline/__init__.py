"""Tests of benchmarks.timeline."""
