"""Memory of trainings that Korthikanti et al. published in 2022 (arXiv 2205.05198, figure 1)."""

import pytest
import torch

from torchgpipe.distributed import dry_run
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, layers, tensor_plan


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
    'depth, width, heads, virtual, gib', [(6, 25600, 160, 1, 33.0), (9, 20480, 128, 3, 31.6)]
)
def test_parameters_and_optimizer_of_a_rank(depth, width, heads, virtual, gib):
    """The paper has 64 and 35 ranks along the pipe axis, here 3, with as many blocks on each.

    It counts the blocks. Here the first and the last rank have embedding and head as well.
    """
    pipe, stages = 3, 3 * virtual
    with torch.device('meta'):
        module = layers(GPT(Sizes(51200, 2048, width, heads, depth))).bfloat16()
    balance = [depth // stages + (j in (0, stages - 1)) for j in range(stages)]
    x = torch.empty(6, 2048, dtype=torch.long, device='meta')
    report = dry_run(
        module,
        balance,
        x,
        x,
        parallel_cross_entropy,
        mesh={'pipe': pipe, 'tensor': 8},
        chunks=6,
        schedule='interleaved' if virtual > 1 else '1f1b',
        checkpoint='always',
        tensor_plan=tensor_plan(),
        optimizer=Adam,
    )
    found = [(each.parameters + each.optimizer) / 2**30 for each in report.ranks]
    middle = found[len(found) // 2]
    assert middle == pytest.approx(gib, rel=0.03), (min(found), max(found))
