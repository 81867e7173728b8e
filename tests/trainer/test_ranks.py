"""Values that ranks exchange."""

import re

import pytest

from tests.trainer.tiny import TINY
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.ranks import NOT_FINITE

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


def test_it_stops_before_the_optimizer_uses_values_that_are_not_finite(tmp_path, run):
    code, out, err = run(*TINY, '--output', tmp_path, '--lr', '1e300')
    assert code == NOT_FINITE
    assert re.search(r'^step 2: the loss is nan.* not finite on ranks \[0\]', err)
