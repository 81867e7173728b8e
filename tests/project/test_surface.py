"""The surface: every promise on a `GPipe`, and on a `DistributedGPipe` of one rank and of two."""

import re
import traceback
from itertools import product

import pytest

from tests.project.surface import ERRORS, PROMISES, REFUSED, SETTINGS, Setting
from tests.shard.processes import Failure, outcomes, run


def kept(name):
    """Return the error of each promise that a setting breaks, by its name."""
    setting, found = Setting(name), {}
    for each, promise in PROMISES.items():
        if reason(each, name) is None and each not in ERRORS:
            try:
                promise(setting)
            except BaseException:
                found[each] = traceback.format_exc()
    return found


def reason(promise, setting):
    """Return why a setting refuses a promise; ``None`` if it keeps it."""
    return REFUSED.get((promise, 'gpipe' if setting == 'gpipe' else 'distributed'))


def test_errors():
    """After them ranks end, so each has processes of its own."""
    for promise, setting in [*product(ERRORS, SETTINGS)]:
        found = [
            each.text
            for each in outcomes(SETTINGS[setting], only, promise, setting)
            if isinstance(each, Failure)
        ]
        assert any(re.search(ERRORS[promise], text) for text in found), found


def test_promises():
    """All of them run in one set of processes."""
    for setting in SETTINGS:
        for rank, found in enumerate(run(SETTINGS[setting], kept, setting, timeout=240)):
            assert not found, f'rank {rank}:\n' + '\n'.join(found.values())


def test_refusals_raise():
    for promise, setting in REFUSED:
        assert setting == 'distributed'
        with pytest.raises(RuntimeError, match='rank 0 failed'):
            run(1, only, promise, 'one rank')


def only(promise, setting):
    """Run one promise."""
    PROMISES[promise](Setting(setting))


def test_the_list_is_long():
    assert len(PROMISES) >= 60 and len(REFUSED) <= 8
