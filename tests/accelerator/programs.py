"""Programs that need the package's stream operations: waits, records, choices of a stream.

Each compares with the unwrapped model, or checks which events may not wait for others, under the
race detector. They copy numbers to the CPU at their end only, because that waits for all earlier
kernels.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests import accelerator
from tests.accelerator.layers import AddTable, Elsewhere, Pop, Shift, Stash, TwoPlaces
from tests.accelerator.timeline import Timeline
from tests.helpers import Call, assert_same, gradients, in_partitions, nodes, small_model
from tests.skip.models import WIDTH, crossing
from torchgpipe import GPipe, NoChunk
from torchgpipe.balance import profile
from torchgpipe.engine.backward_order import Copy, Wait
from torchgpipe.engine.checkpoint import selection
from torchgpipe.engine.streams import CPUStream

FOUR = ['sim:0', 'sim:1', 'sim:2', 'sim:3']


class Pair:
    """A model on the CPU, and the same in a pipeline."""

    def __init__(self, model, balance, devices=FOUR, mode='always', chunks=3, **options):
        self.model = copy.deepcopy(model)
        self.gpipe = GPipe(
            model, balance, devices=devices, chunks=chunks, checkpoint=mode, **options
        )
        self.outputs = []

    def forward(self):
        x = torch.randn(7, WIDTH, dtype=torch.double)
        expected, actual = self.model(x), self.gpipe(x.to(self.gpipe.devices[0]))
        self.outputs.append((expected.detach(), actual.detach()))
        return expected.square().sum(), actual.square().sum()

    def train(self, steps=2):
        """Let both do training steps, without a wait between them."""
        for _ in range(steps):
            for loss in self.forward():
                loss.backward()

    @torch.no_grad()
    def update(self):
        """Let both change their parameters, without a wait."""
        for parameter in (*self.model.parameters(), *self.gpipe.parameters()):
            parameter.mul_(0.9)

    def step(self, steps=3, **options):
        """Let both do training steps, the pipeline by a schedule."""
        for _ in range(steps):
            x = torch.randn(7, WIDTH, dtype=torch.double)
            expected = self.model(x)
            expected.square().sum().backward()
            _, actual = self.gpipe.step(
                x.to(self.gpipe.devices[0]),
                None,
                lambda output, _: output.square().sum(),
                normalizer=1,
                return_output=True,
                **options,
            )
            self.outputs.append((expected.detach(), actual))

    def check(self):
        """Compare outputs and gradients."""
        expected, actual = zip(*self.outputs)
        assert_same(
            [*(y.cpu() for y in actual), *gradients(self.gpipe)],
            [*expected, *gradients(self.model)],
            1e-9,
        )


@contextmanager
def side_streams():
    """Let other streams than the default ones be current, on all devices."""
    before = [torch.accelerator.current_stream(device) for device in range(4)]
    sides = [torch.Stream(stream.device) for stream in before]
    use = torch.accelerator.set_stream
    for side, stream in zip(sides, before):
        side.wait_stream(stream)
        use(side)
    torch.accelerator.set_device_index(0)
    try:
        yield
    finally:
        for side, stream in zip(sides, before):
            stream.wait_stream(side)
            use(stream)
        torch.accelerator.set_device_index(0)


def training(mode='except_last'):
    """Train on four devices; skips cross, nest, and pass devices by."""
    pair = Pair(crossing(), [2, 1, 2, 1], mode=mode)
    pair.train()
    pair.check()


def without_grad():
    """Free copies in the last partition while they are read, because no backward follows."""
    pair = Pair(crossing(), [2, 2, 2])
    with torch.no_grad():
        for _ in range(5):
            pair.forward()
    pair.check()


def partitions_share_devices(mode='except_last'):
    """Let partitions have copy streams in common."""
    pair = Pair(crossing(), [1, 2, 2, 1], ['sim:0', 'sim:1', 'sim:0', 'sim:1'], mode)
    pair.train()
    pair.check()


def devices_and_the_cpu(mode='except_last'):
    """Go from a device to the CPU and back, and the other way round."""
    for devices in (['sim:0', 'cpu', 'sim:1'], ['cpu', 'sim:0', 'cpu']):
        pair = Pair(crossing(), [2, 2, 2], devices, mode)
        pair.train()
        pair.check()


def side_streams_without_grad():
    """The same as without grad, where the current streams are not the default ones."""
    with side_streams():
        without_grad()


def gradients_accumulate_on_side_streams(mode='except_last'):
    """Copy gradients into memory that the backward pass before has freed.

    Where the current stream is the default one, autograd orders that.
    """
    pair = Pair(crossing(), [2, 1, 2, 1], mode=mode)
    with side_streams():
        losses = [*pair.forward(), *pair.forward()]
        for loss in losses:
            loss.backward()
    pair.check()


def backward_in_another_thread(mode='except_last'):
    """Call backward where other streams are current than in forward."""
    pair = Pair(crossing(), [2, 1, 2, 1], mode=mode)
    with side_streams(), ThreadPoolExecutor(1) as pool:
        losses = [*pair.forward(), *pair.forward()]
        for loss in losses:
            pool.submit(loss.backward).result()
    pair.check()


def micro_batches_share_a_tensor(mode='except_last'):
    """Copy one tensor for each micro-batch, and sum up its gradients."""
    layers = AddTable(), AddTable(), AddTable(), Call(lambda xs: xs[0])
    pair = Pair(nn.Sequential(*layers).double(), [1, 1, 2], mode=mode)
    x, table = torch.randn(7, WIDTH).double(), torch.randn(WIDTH).double().requires_grad_()
    there = table.detach().to('sim:0').requires_grad_()
    for _ in range(2):
        pair.model[1:](pair.model[0](x, table * 2)).square().sum().backward()
        pair.gpipe(x.to('sim:0'), NoChunk(there * 2)).square().sum().backward()
    assert_same(
        [there.grad.cpu(), *gradients(pair.gpipe)], [table.grad, *gradients(pair.model)], 1e-9
    )


def hooks_pack_inputs(mode='always'):
    """Let saved-tensor hooks compute; go through the graph twice, the last time in part."""
    pair = Pair(small_model(3, WIDTH), [2, 2, 2], mode=mode)
    with side_streams():
        with saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
            losses = [*pair.forward(), *pair.forward()]
        for k in range(4):
            losses[k].backward(retain_graph=True)
        for model in [pair.model, pair.gpipe] * 2:
            parameters = list(model.parameters())
            grads = torch.autograd.grad(losses.pop(0), parameters)  # which frees the graph
            for parameter, grad in zip(parameters, grads):
                parameter.grad += grad
    pair.check()


def inputs_wait_on_the_host(mode='always'):
    """Free inputs while they are copied to the host, and restored ones while they are in use."""
    with side_streams():
        pair = Pair(crossing(), [2, 1, 2, 1], mode=mode, offload=True)
        pair.train(3)
    pair.check()


def kept_results_go_to_the_host_before_a_change():
    """Change a kept result in place while it is copied to the host."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).double()
    with side_streams(), mock.patch.object(selection, 'LARGE', 1):
        pair = Pair(model, [3], ['sim:0'], keep='products', offload=True)
        pair.train(3)
    pair.check()


def steps_by_a_schedule(mode='except_last'):
    """Train in the order of 1F1B; skips cross, nest, and pass devices by."""
    with side_streams():
        pair = Pair(crossing(), [2, 1, 2, 1], mode=mode, chunks=4)
        pair.step()
    pair.check()


def steps_through_virtual_stages(mode='except_last'):
    """Let a skip stay on a device, while the batch goes to another one and comes back."""
    with side_streams():
        pair = Pair(crossing(), [1, 2, 2, 1], ['sim:0', 'sim:1', 'sim:0', 'sim:1'], mode)
        pair.step(schedule='interleaved')
    pair.check()


def steps_with_a_change_in_place():
    """Change a tensor from another device in place."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    pair = Pair(nn.Sequential(*layers).double(), [1, 2], mode='never')
    pair.step()
    pair.check()


def steps_of_a_frozen_start():
    """Free copies while they are read, because there is no gradient to wait for."""
    for frozen in (1, 3):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).double()
        model[:frozen].requires_grad_(False)
        with side_streams():
            pair = Pair(model, [1, 1, 1, 1], mode='never')
            pair.step(5)
        pair.check()


def steps_make_tensors():
    """Let layers find their device current."""
    for devices in (['sim:2', 'sim:2'], ['sim:1', 'sim:2']):
        pair = Pair(
            nn.Sequential(Shift(WIDTH, WIDTH), Shift(WIDTH, WIDTH)).double(), [1, 1], devices
        )
        pair.step()
        pair.check()


def a_hook_gives_another_gradient():
    """Read a copy in a hook, after which it is not needed."""
    with side_streams():
        compute = [torch.accelerator.current_stream(device) for device in range(2)]
        copies = [torch.Stream(stream.device) for stream in compute]

        def double(grads, _):
            compute[0].wait_stream(copies[0])
            with accelerator.on(compute[0]):
                return tuple(grad * 2 for grad in grads)

        x, losses = torch.ones(1, device='sim:0', requires_grad=True), []
        for _ in range(3):
            (y,) = Wait.apply(compute[0], copies[0], x * 1)
            (y,) = Copy.apply(*copies, y)
            y.grad_fn.register_hook(double)
            losses += Wait.apply(copies[1], compute[1], y)
        for loss in losses:
            loss.backward()
    assert x.grad.item() == 6


def copies_know_who_reads_the_gradient():
    """Record a gradient with the stream on which the cell runs that it goes back to."""
    with side_streams():
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        gpipe = GPipe(nn.Sequential(*layers), [1, 1, 1], chunks=2)
        output = gpipe(torch.rand(2, WIDTH, device='sim:0'))
        readers = {
            node.prev_compute for node in nodes(output) if isinstance(node, Copy._backward_cls)
        }
        assert readers == {torch.accelerator.current_stream(device) for device in range(2)}


def only_a_skip_has_a_gradient(mode='except_last'):
    """Bring back one gradient past the batch, which has none."""
    pair = Pair(nn.Sequential(Stash(WIDTH, WIDTH).double(), Pop()), [1, 1], mode=mode)
    pair.train(3)
    pair.check()


def outputs_in_two_places():
    """Recompute each micro-batch once, in the device's thread and not in the CPU's."""
    layer = TwoPlaces()
    gpipe = in_partitions(None, nn.Linear(WIDTH, WIDTH), layer, chunks=4, checkpoint='always')
    a, b = gpipe(torch.rand(4, WIDTH, device='sim:0'))
    (a.sum() + b.cpu().sum()).backward()
    assert len(layer.recomputed_in) == 4 and threading.get_ident() not in layer.recomputed_in


def samples_from_another_device():
    """Compare samples when they have come, wherever they come from."""
    layer = Elsewhere()
    pair = Pair(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), layer), [1, 1], chunks=1)
    pair.train(1)
    layer.moved.synchronize()
    pair.train(1)
    pair.check()


def layers_make_tensors():
    """Let layers find their device current, and the caller's be current afterwards."""
    for devices in (['sim:2', 'sim:2'], ['sim:1', 'sim:2']):
        pair = Pair(
            nn.Sequential(Shift(WIDTH, WIDTH), Shift(WIDTH, WIDTH)).double(), [1, 1], devices
        )
        pair.train()
        pair.check()
        assert torch.accelerator.current_device_index() == 0


def layers_are_profiled():
    """Let layers find the device current on which they are profiled, and restore the caller's."""
    profile(nn.Sequential(Shift(WIDTH, WIDTH)), torch.rand(4, WIDTH), device='sim:2', timeout=0)
    assert torch.accelerator.current_device_index() == 0


def the_host_waits():
    """Look at a number on the CPU that a stream has yet to copy there."""
    stream = torch.Stream('sim:0')
    with accelerator.on(stream):
        x = torch.ones(3, device='sim:0', requires_grad=True)
        accelerator.sleep(10000)
        y = x.to('cpu', non_blocking=True)
    (y,) = Wait.apply(stream, CPUStream, y)
    assert y.tolist() == [1, 1, 1]


def _tied():
    """Return layers that have one weight, and two that have one bias."""
    first, *layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers:
        layer.weight = first.weight
    layers[2].bias = layers[0].bias
    return nn.Sequential(first, *layers).double()


def parameters_are_shared(mode='except_last'):
    """Change shared parameters as soon as they have their gradient, on any streams."""
    for devices in (FOUR, ['sim:0', 'cpu', 'sim:1', 'sim:0'], ['cpu', 'sim:0', 'cpu', 'sim:0']):
        pair = Pair(_tied(), [1, 1, 1, 1], devices, mode)
        with side_streams():
            for _ in range(3):
                pair.train(1)
                pair.update()
        pair.check()


def parameters_are_shared_without_grad():
    """Change shared parameters right after a forward pass, and free the copies."""
    pair = Pair(_tied(), [1, 1, 1, 1])
    with side_streams(), torch.no_grad():
        for _ in range(5):
            pair.forward()
            pair.update()
    pair.check()


class PendingComparison(Timeline):
    """Run backward on device 1 only when the shared parameter's gradient is being copied to 0."""

    def __init__(self):
        super().__init__()
        self.gradient = threading.Event()

    def mark(self, what, device):
        """Wait for that, or tell it."""
        if (what, device.index) == ('to 0 from', 2):
            self.gradient.set()
        if (what, device.index) == ('backward', 1):
            assert self.gradient.wait(60)
        super().mark(what, device)


def devices_do_not_wait_for_what_is_shared():
    """Copy a parameter while the first micro-batch is computed, and its gradient in the end."""
    timeline = PendingComparison().run(tied=True)
    first, last = timeline.events['backward', 0], timeline.events['backward', 2]
    assert len(first) == len(last) == 3 and not accelerator.is_ordered(last[2], first[0])
    there = timeline.events['to 2 from', 0]
    assert len(there) == 1
    assert not accelerator.is_ordered(there[0], timeline.events['forward', 0][0])


def copies_overlap_with_computation(**options):
    """Let the next micro-batch be copied while a partition computes, and the other way round."""
    timeline = Timeline().run(**options)
    for j in range(2):
        there, back = (f'to {j + 1} from', j), (f'to {j} from', j + 1)
        assert timeline.is_free(there, ('forward', j + 1), after=1)
        assert timeline.is_free(('forward', j), there, after=1)
        assert timeline.is_free(back, ('backward', j), after=1)
        assert timeline.is_free(('backward', j + 1), back, after=1)


def recomputations_overlap_with_what_comes_before():
    """Recompute while the next partition is in backward, and while its gradient is copied."""
    timeline = Timeline().run()
    for j in range(2):
        assert timeline.is_free(('recomputation', j), ('backward', j + 1))
        assert timeline.is_free(('recomputation', j), (f'to {j} from', j + 1))


def copies_of_a_step_overlap_with_computation():
    """Let the same be so in a step."""
    copies_overlap_with_computation(schedule='gpipe')


def recomputations_of_a_step_overlap_with_what_comes_before():
    """Recompute while the next partition computes the gradient, and while that is copied."""
    timeline = Timeline().run(schedule='gpipe')
    for j in range(2):
        assert timeline.is_free(('recomputation', j), ('backward', j + 1))


def inputs_go_and_come_beside_cells():
    """Let an input go to the host while the next cell computes, and come back likewise."""
    timeline = Timeline().run(offload=True)
    for j in range(3):
        assert timeline.is_free(('forward', j), ('to the host', j), after=1)
        assert timeline.is_free(('from the host', j), ('backward', j), after=1)


#: Those that are run in each checkpoint mode.
IN_MODES = [
    training,
    partitions_share_devices,
    devices_and_the_cpu,
    gradients_accumulate_on_side_streams,
    backward_in_another_thread,
    only_a_skip_has_a_gradient,
    micro_batches_share_a_tensor,
    hooks_pack_inputs,
    inputs_wait_on_the_host,
    parameters_are_shared,
    steps_by_a_schedule,
    steps_through_virtual_stages,
]

OTHERS = [
    without_grad,
    side_streams_without_grad,
    a_hook_gives_another_gradient,
    copies_know_who_reads_the_gradient,
    outputs_in_two_places,
    samples_from_another_device,
    layers_make_tensors,
    the_host_waits,
    copies_overlap_with_computation,
    recomputations_overlap_with_what_comes_before,
    inputs_go_and_come_beside_cells,
    parameters_are_shared_without_grad,
    devices_do_not_wait_for_what_is_shared,
    steps_with_a_change_in_place,
    steps_make_tensors,
    copies_of_a_step_overlap_with_computation,
    recomputations_of_a_step_overlap_with_what_comes_before,
    steps_of_a_frozen_start,
]
