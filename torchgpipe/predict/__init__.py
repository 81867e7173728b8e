"""Predictions: time and memory of a step by a schedule, from the costs of layers."""
