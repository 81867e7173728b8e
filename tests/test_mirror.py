"""Each module of the package has a test at the mirrored place, but for so many."""
from pathlib import Path

import torchgpipe

PACKAGE, TESTS = Path(torchgpipe.__file__).parent, Path(__file__).parent

#: It may fall, and does not rise.
MOST = 43


def has_test(module):
    """Return whether `a/b.py` has a `tests/a/test_b.py`, or several as `tests/a/test_b_*.py`."""
    folder = TESTS / module.parent.relative_to(PACKAGE)
    return any([*folder.glob(f'test_{module.stem}.py'), *folder.glob(f'test_{module.stem}_*.py')])


def test_modules_without_a_test_at_the_mirrored_place():
    """For a new module: one in a new file of tests, or in one that is renamed."""
    modules = [path for path in PACKAGE.rglob('*.py') if not path.stem.startswith('__')]
    without = sorted(str(path.relative_to(PACKAGE)) for path in modules if not has_test(path))
    assert len(without) <= MOST, f'{len(without)} modules have none: {", ".join(without)}'
    assert 'engine/microbatches.py' not in without and len(modules) > 100
