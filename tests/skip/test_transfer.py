"""The transfer of skips between cells: kept by one, taken by another, in the tensors' order."""

import pytest
import torch

from torchgpipe.base.structure import bare
from torchgpipe.skip.transfer import Skip, SkipTracker, arrive, keep, leave, take

A, B, C = (None, 'a'), (None, 'b'), (None, 'c')
ROUTES = [(2, A), (2, B)]


def tracker(**tensors):
    """Return a tracker with stashed tensors."""
    found = SkipTracker()
    for name, x in tensors.items():
        found.save(None, None, name, x)
    return found


def test_skips_go_from_tracker_to_tracker_and_leave_the_lists_that_they_pass():
    x, y, z = torch.ones(1), torch.zeros(2), torch.full((3,), 3.0)
    left = leave(tracker(a=x, b=y, c=z), ROUTES)
    assert [*left] == [A, B]  # c stays in its partition
    waiting, output = {}, [torch.ones(5), *left.values()]
    keep(waiting, ROUTES, 1, dict.fromkeys(left, bare), output)
    assert [(skip.j, skip.k) for skip in waiting.values()] == [(1, 1), (1, 2)]
    skips, popped, absent = take(waiting, [(1, B), (1, A)])
    assert not waiting and [*popped] == [B, A] and not absent
    tensors = [torch.ones(5), *[skip.tensor for skip in skips]]
    arrived = arrive(popped, absent, tensors)
    assert arrived.load(None, None, 'a') is x and arrived.load(None, None, 'b') is y
    assert len(tensors) == 1 and tensors[0].shape == (5,)


def test_none_is_passed_on_without_a_tensor():
    waiting = {}
    left = leave(tracker(a=None, b=torch.ones(1)), ROUTES)
    keep(waiting, ROUTES, 0, dict.fromkeys(left, bare), [torch.ones(5), *left.values()])
    assert waiting[A] == Skip(None)
    skips, popped, absent = take(waiting, [(0, A), (0, B)])
    assert len(skips) == 1 and [*popped] == [B] and absent == [A]
    assert arrive(popped, absent, [torch.ones(1)]).tensors[A] is None


def test_a_change_in_place_while_a_skip_waits_raises():
    waiting, x = {}, torch.ones(1)
    keep(waiting, ROUTES[:1], 0, {A: bare}, [x])
    x.add_(1)
    with pytest.raises(RuntimeError, match="the skip tensor 'a' was changed in place"):
        take(waiting, ROUTES[:1])


def test_a_declared_skip_that_was_not_stashed_raises():
    with pytest.raises(RuntimeError, match="'b' must be stashed but have not"):
        leave(tracker(a=torch.ones(1)), ROUTES)
