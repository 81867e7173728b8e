"""Each module of the package has a test at the mirrored place."""

from pathlib import Path

import torchgpipe

PACKAGE, TESTS = Path(torchgpipe.__file__).parent, Path(__file__).parents[1]


def has_test(module):
    """Return whether `a/b.py` has a `tests/a/test_b.py`, or several as `tests/a/test_b_*.py`."""
    folder = TESTS / module.parent.relative_to(PACKAGE)
    return any([*folder.glob(f'test_{module.stem}.py'), *folder.glob(f'test_{module.stem}_*.py')])


def test_each_module_has_a_test_at_the_mirrored_place():
    modules = [path for path in PACKAGE.rglob('*.py') if not path.stem.startswith('__')]
    assert not [str(path.relative_to(PACKAGE)) for path in modules if not has_test(path)]
    assert len(modules) > 80 and not has_test(PACKAGE / 'engine/other.py')
