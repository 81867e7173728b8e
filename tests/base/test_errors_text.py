"""Text output: aligned tables, and numbers with three digits."""

import pytest

from torchgpipe.base.errors import duration, format_bytes, table


def test_the_first_column_is_aligned_left_and_numbers_right():
    assert table(['name', 'ms'], [['a', 10], ['longer', 9]]).splitlines() == [
        'name    ms',
        '──────  ──',
        'a       10',
        'longer   9',
    ]


@pytest.mark.parametrize(
    'number, text',
    [
        (0, '0 B'),
        (1023, '1023 B'),
        (1024, '1.00 KiB'),
        (999.4 * 1024, '999 KiB'),
        (1000 * 1024, '0.98 MiB'),
        (2**50, '1024 TiB'),
    ],
)
def test_bytes_have_a_unit(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    'seconds, text',
    [(0, '0 s'), (1, '1 s'), (0.9994, '999 ms'), (1e-3, '1 ms'), (9.994e-4, '999 µs')],
)
def test_durations_have_a_unit(seconds, text):
    assert duration(seconds) == text
