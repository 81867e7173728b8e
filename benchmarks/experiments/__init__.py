"""The experiments: what each measures, on the harness that they share."""
