"""Tests of benchmarks.harness."""
