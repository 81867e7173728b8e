"""Marks of tests: values of parameters that only ``--whole`` runs, and modes of checkpointing."""

import pytest

MODES = ['always', 'except_last', 'never']

#: For tests that depend on the mode. Other tests use one, or the harness of tests/equivalence.py.
modes = pytest.mark.parametrize('mode', MODES)


def slow(*values, **options):
    """Return values of ``pytest.mark.parametrize`` that run with ``--whole`` only."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def slow_after(number, values):
    """Return values of ``pytest.mark.parametrize``, of which all after the first ones are slow."""
    return [
        *values[:number],
        *(slow(*v) if isinstance(v, tuple) else slow(v) for v in values[number:]),
    ]
