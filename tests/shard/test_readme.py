"""The examples of TorchShard's README, unchanged."""

import os
import tempfile

import torch
from torch import nn

import torchgpipe.shard as ts
from tests.shard.nn.oracle import close, cut
from tests.shard.processes import run
from torchgpipe.shard.parameter import storage_dim


def snippet():
    """Run it, and compare it with one process."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        in_a_folder()


def in_a_folder():
    """Do so in the current folder."""
    torch.set_default_dtype(torch.double)
    ts.distributed.init_process_group(group_size=2)  # init parallel groups

    torch.manual_seed(1)
    m = torch.nn.Sequential(
        torch.nn.Linear(20, 30, bias=True),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=None),  # equal to nn.Linear()
        ts.nn.ParallelLinear(30, 30, bias=True, dim=0),  # parallel in row dimension
        ts.nn.ParallelLinear(30, 30, bias=True, dim=1),  # parallel in column dimension
    )

    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(20, 30), *[nn.Linear(30, 30) for _ in range(3)])
    x, y = torch.randn(8, 20), torch.randint(30, (8,))
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()

    x = m(x)  # forward
    loss = ts.nn.functional.parallel_cross_entropy(x, y)  # parallel loss function
    loss.backward()  # backward

    torch.save(ts.collect_state_dict(m, m.state_dict()), 'm.pt')  # save model state

    close(loss, expected)
    for whole, part in zip(plain.parameters(), m.parameters()):
        close(part.grad, cut(whole.grad, storage_dim(part)))
    saved = torch.load('m.pt')
    assert saved.keys() == plain.state_dict().keys()
    for key, whole in plain.state_dict().items():
        assert torch.equal(saved[key], whole)


def test_the_snippet_of_the_readme():
    run(2, snippet)
    run(4, snippet)
