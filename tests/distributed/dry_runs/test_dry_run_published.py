"""Memory of trainings that Korthikanti et al. published in 2022 (arXiv 2205.05198, figure 1)."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.models.gpt import GPT, Sizes, layers, tensor_plan
from tests.marks import slow_after
from torchgpipe.distributed import dry_run


class Adam(torch.optim.Optimizer):
    """Adam of mixed precision: weights, gradients and both moments are in float32 as well."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for x in self.param_groups[0]['params']:
            self.state[x] = {
                name: torch.zeros_like(x, dtype=torch.float32)
                for name in ('weight', 'gradient', 'mean', 'square')
            }


@pytest.mark.slow
@pytest.mark.parametrize(
    'depth, width, heads, pipe, virtual, micro_batch, chunks, gib',
    slow_after(
        1,
        [
            (48, 6144, 64, 1, 1, 4, 1, 45.6),
            (96, 12288, 96, 8, 3, 1, 64, 45.6),
            (105, 20480, 128, 35, 3, 1, 280, 31.6),
            (128, 25600, 160, 64, 1, 1, 512, 33.0),
        ],
    ),
)
def test_parameters_and_optimizer_of_a_rank(
    depth, width, heads, pipe, virtual, micro_batch, chunks, gib
):
    """The paper counts the blocks. Here the first and the last rank have embedding and head."""
    stages = pipe * virtual
    with torch.device('meta'):
        module = layers(GPT(Sizes(51200, 2048, width, heads, depth))).bfloat16()
    balance = [
        depth // stages + (j < depth % stages) + (j == 0) + (j == stages - 1)
        for j in range(stages)
    ]
    x = torch.empty(micro_batch * chunks, 2048, dtype=torch.long, device='meta')
    report = dry_run(
        module,
        balance,
        x,
        x,
        lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        mesh={'pipe': pipe, 'tensor': 8},
        chunks=chunks,
        schedule='interleaved' if virtual > 1 else '1f1b',
        checkpoint='always',
        tensor_plan=tensor_plan(),
        optimizer=Adam,
    )
    found = [(each.parameters + each.optimizer) / 2**30 for each in report.ranks]
    middle = found[len(found) // 2]
    assert middle == pytest.approx(gib, rel=0.03), (min(found), max(found))
