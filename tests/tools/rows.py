"""The table of working features, made by tests: each test that shows one is a row."""

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

#: Rows by the files of their tests.
ROWS = {}

FILES = sorted(path.stem for path in Path(__file__).parent.glob('test_*.py'))


def works(tool, what, package=None):
    """Mark a test that shows a feature of a tool. Skip it if a package is not installed."""

    def show(test):
        ROWS.setdefault(test.__module__, []).append((tool, what))
        if package is None:
            return test
        missing = importlib.util.find_spec(package) is None
        for mark in (
            pytest.mark.tools,
            pytest.mark.filterwarnings('ignore'),
            pytest.mark.skipif(
                missing, reason=f"{package} is not installed: pip install -e '.[tools]'"
            ),
        ):
            test = mark(test)
        return test

    return show


def table():
    """Return the table as Markdown."""
    for name in FILES:
        import_module(f'tests.tools.{name}')
    rows = [row for _, rows in sorted(ROWS.items()) for row in rows]
    return (
        '\n'.join(
            [
                '| tool | supported use |',
                '|---|---|',
                *(f'| {tool} | {what} |' for tool, what in rows),
            ]
        )
        + '\n'
    )


if __name__ == '__main__':
    from tests.tools import rows

    print(rows.table(), end='')
