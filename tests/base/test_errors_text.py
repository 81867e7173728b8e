"""Text output: aligned tables, and numbers with three digits."""

from torchgpipe.base.errors import duration, format_bytes, table


def test_the_first_column_is_aligned_left_and_numbers_right():
    assert table(['name', 'ms'], [['a', 10], ['longer', 9]]).splitlines() == [
        'name    ms',
        '──────  ──',
        'a       10',
        'longer   9',
    ]


def test_bytes_have_a_unit():
    for number, text in [
        (0, '0 B'),
        (1023, '1023 B'),
        (1024, '1.00 KiB'),
        (999.4 * 1024, '999 KiB'),
        (1000 * 1024, '0.98 MiB'),
        (2**50, '1024 TiB'),
    ]:
        assert format_bytes(number) == text


def test_durations_have_a_unit():
    for seconds, text in [
        (0, '0 s'),
        (1, '1 s'),
        (0.9994, '999 ms'),
        (1e-3, '1 ms'),
        (9.994e-4, '999 µs'),
    ]:
        assert duration(seconds) == text
