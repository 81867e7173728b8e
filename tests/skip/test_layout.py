"""Where skips start and end."""

from torch import nn

from tests.skip.layers import Pop, Stash, popping, stashing
from torchgpipe.skip import Namespace
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout

one, two = Namespace(), Namespace()


def test_copy_policy():
    for partitions, policy in [
        ([[nn.Identity()], [nn.Identity()]], [[], []]),
        ([[Stash(), Pop()], [nn.Identity()]], [[], []]),
        ([[Stash()], [Pop()]], [[], [(0, None, 'skip')]]),
        ([[Stash()], [nn.Identity()], [Pop()]], [[], [], [(0, None, 'skip')]]),
        (
            [[Stash()], [stashing('b')()], [popping('b')(), Pop()]],
            [[], [], [(0, None, 'skip'), (1, None, 'b')]],
        ),
        (
            [[stashing('a', 'b')()], [popping('b')()], [popping('a')()]],
            [[], [(0, None, 'b')], [(0, None, 'a')]],
        ),
        (
            [
                [Stash().isolate(one)],
                [Stash().isolate(two)],
                [Pop().isolate(two), Pop().isolate(one)],
            ],
            [[], [], [(0, one, 'skip'), (1, two, 'skip')]],
        ),
    ]:
        layout = inspect_skip_layout([nn.Sequential(*layers) for layers in partitions])
        assert [list(layout.copy_policy(j)) for j in range(len(partitions))] == policy


def test_only_skips_to_another_partition_are_copied():
    layout = SkipLayout(
        num_partitions=2,
        skip_routes={(None, 'far'): (0, 1), (None, 'near'): (1, 1), (one, 'far'): (0, 0)},
    )
    assert layout.requires_copy(None, 'far')
    assert not layout.requires_copy(None, 'near')
    assert not layout.requires_copy(one, 'far')
    assert not layout.requires_copy(None, 'unknown')
    assert layout.incoming(1) == [(0, (None, 'far'))]
    assert layout.outgoing(0) == [(1, (None, 'far'))]
