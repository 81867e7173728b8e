"""Predictions: what a step by a schedule takes in time and memory, from what layers cost."""
