"""The experiments, each a module that benchmarks.commands lists, on the harness they share."""
