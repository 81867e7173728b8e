"""The rows of ranks, driven by PyTorch's own schedule runtime: the same numbers to the bit."""

import pytest
import torch
from torch.distributed.pipelining import schedules

from tests.distributed.models import perceptron, train, unet
from tests.marks import slow
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh, transport
from torchgpipe.schedule import Action


class Runtime(schedules._PipelineScheduleRuntime):
    """PyTorch's runtime, with the actions of a row."""

    def __init__(self, row, do):
        self._comp_type_to_function_map, self._stages, self.rank = {}, [], 0
        self.backward_counter, self.unshard_ops = {}, {}
        self.pipeline_order_with_comms = {
            0: [schedules._Action(each.stage, self.kind(each), k) for k, each in enumerate(row)]
        }
        for kind in {self.kind(each) for each in row}:
            self.register_custom_function(
                kind, lambda action, context: do(row[action.microbatch_index])
            )

    @staticmethod
    def kind(each):
        """PyTorch's kind of an action; those that it does not let others do go by another one."""
        kind = each.kind if isinstance(each, Action) and each.kind != 'R' else 'UNSHARD'
        return schedules._ComputationType(kind)

    def _check_inputs(self, *args):
        return [()], [{}]

    def _initialize_stages(self, *args, **kwargs):
        pass

    def _update_losses(self, *args):
        pass


def trained(make, stages, schedule, by_runtime):
    """Train on a rank; give all, and how many actions the runtime had."""
    count = []

    def drive(row, do):
        Runtime(row, do)._step_microbatches()
        count.append(len(row))

    if by_runtime:
        transport.drive = drive
    with torch.device('meta'):
        module = make()
    model = DistributedGPipe(module, [8 // stages] * stages, mesh=init_mesh(pipe=2), chunks=3)
    return train(model, lambda x: x, schedule=schedule), count


@pytest.mark.skipif(
    not hasattr(schedules._PipelineScheduleRuntime, 'register_custom_function'),
    reason='this release has another runtime',
)
@pytest.mark.parametrize(
    'make, stages, schedule',
    [(unet, 4, 'interleaved'), slow(perceptron, 2, 'zb-h1')],
)
def test_runtime_and_loop_are_equal_to_the_bit(make, stages, schedule):
    for (one, count), (other, none) in zip(
        run(2, trained, make, stages, schedule, True),
        run(2, trained, make, stages, schedule, False),
    ):
        assert len(count) == 4 and not none
        for (loss, norm, grads), (own_loss, own_norm, own) in zip(one[0], other[0]):
            assert (loss, norm) == (own_loss, own_norm) and grads.keys() == own.keys()
            assert all(torch.equal(grad, own[name]) for name, grad in grads.items())
        assert all(torch.equal(x, other[1][name]) for name, x in one[1].items())
