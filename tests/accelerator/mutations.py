"""Mutations: each line of the package that waits, records or chooses a stream, taken out.

Each comes with the program that detects it: by a race, a wrong number, an error, or by actions
that are no longer concurrent.
"""

import ast
import inspect
import textwrap
from typing import Any, NamedTuple

from tests.accelerator import programs as P
from torchgpipe.engine import backward_order, plain_call, run, scheduled, shared, streams, workers
from torchgpipe.engine.checkpoint import offload, recomputation, samples
from torchgpipe.engine.streams import default_stream, no_context


def source_of(function):
    """Return the source of a function with one line per statement, however it is formatted."""
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))


class Mutation(NamedTuple):
    """A piece of a function's source, the program that detects its removal, and the replacement.

    The source is as :func:`source_of` returns it.
    The replacement is ``mutated()``, or ``mutated(value)``: see :class:`Mutated`.
    """

    function: Any
    old: str
    program: Any
    new: str = 'mutated()'

    def __str__(self):
        new = '' if self.new == 'mutated()' else f' -> {self.new}'
        return f'{self.function.__qualname__}: {self.old}{new}'

    def force(self, monkeypatch):
        """Put it in force, and return the counter."""
        mutated = Mutated()
        monkeypatch.setitem(self.function.__globals__, 'mutated', mutated)
        monkeypatch.setattr(self.function, '__code__', self._code())
        return mutated

    def _code(self):
        source = source_of(self.function)
        assert source.count(self.old) == 1, f'{self}: not what the function says'
        tree = ast.parse(source.replace(self.old, self.new))
        tree.body[0].decorator_list = []
        scope = dict(self.function.__globals__)
        exec(compile(tree, f'<{self}>', 'exec'), scope)
        return scope[self.function.__name__].__code__


class Mutated:
    """The replacement of a line, which counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, value=no_context):
        self.calls += 1
        return value

    def default(self, device):
        """Return the default stream of a device."""
        return self(default_stream(device))


def where_copies(name, wait):
    """Leave out a wait where that stream is a copy stream, which is never the default one."""
    return f'mutated() if getattr({name}, "stream_id", 0) else {wait}'


WAIT, WAIT_BACK = 'wait_stream(next_stream, prev_stream)', 'wait_stream(prev_stream, next_stream)'

# In backward the later one of two nodes on a tensor comes first.
RECOMPUTE_LATER = (
    """output[:] = _wait(run.stream, run.copy_streams[i], output)
        self._tie(i, j, output, recomputation)""",
    """self._tie(i, j, output, recomputation)
        output[:] = mutated(_wait(run.stream, run.copy_streams[i], output))""",
)

MUTATIONS = [
    Mutation(*mutation)
    for mutation in [
        # Copies
        (backward_order.copy_tensor, 'use_stream(source)', P.copies_overlap_with_computation),
        (backward_order.copy_tensor, 'use_stream(target)', P.copies_overlap_with_computation),
        (backward_order.copy_tensor, 'record_stream(tensor, source)', P.training),
        (backward_order.copy_tensor, 'record_stream(copied, compute)', P.without_grad),
        (
            backward_order.Copy.forward,
            'current_stream(get_device(next_stream))',
            P.without_grad,
            'mutated(next_stream)',
        ),
        (
            backward_order.Copy.forward,
            'current_stream(get_device(next_stream))',
            P.side_streams_without_grad,
            'mutated.default(get_device(next_stream))',
        ),
        (
            backward_order.Copy.forward,
            'current_stream(get_device(prev_stream))',
            P.a_hook_gives_another_gradient,
            'mutated.default(get_device(prev_stream))',
        ),
        (
            backward_order.Copy.backward,
            'ctx.prev_compute',
            P.a_hook_gives_another_gradient,
            'mutated(prev_stream)',
        ),
        # Waits: of the compute stream for an arrival, and of a copy stream before a departure
        (backward_order.Wait.forward, WAIT, P.training, where_copies('prev_stream', WAIT)),
        (backward_order.Wait.forward, WAIT, P.training, where_copies('next_stream', WAIT)),
        (
            backward_order.Wait.backward,
            WAIT_BACK,
            P.training,
            where_copies('prev_stream', WAIT_BACK),
        ),
        (
            backward_order.Wait.backward,
            WAIT_BACK,
            P.steps_by_a_schedule,
            where_copies('next_stream', WAIT_BACK),
        ),
        (
            plain_call._wait,
            'Wait.apply(prev_stream, next_stream, *tensors)',
            P.training,
            'mutated(tensors)',
        ),
        (
            plain_call.PlainCall._bring,
            '_wait(run.copy_streams[i], run.stream, tensors)',
            P.training,
            'mutated(tensors)',
        ),
        (
            plain_call.PlainCall._depart,
            '_wait(run.stream, run.copy_streams[i], output)',
            P.training,
            'mutated(output)',
        ),
        (
            streams.wait_stream,
            'as_accelerator(source).wait_stream(as_accelerator(target))',
            P.training,
        ),
        (streams.wait_stream, 'as_accelerator(target).synchronize()', P.the_host_waits),
        (streams.record_stream, 'tensor.record_stream(as_accelerator(stream))', P.training),
        # The streams on which cells and copies run
        (
            run.Run._prepare,
            'current_stream(device)',
            P.side_streams_without_grad,
            'mutated.default(device)',
        ),
        (
            plain_call.PlainCall._copy,
            'use_stream(prev_run.stream)',
            P.copies_know_who_reads_the_gradient,
        ),
        (
            plain_call.PlainCall._act_here,
            'use_stream(self._runs[action.stage].stream)',
            P.side_streams_without_grad,
        ),
        (plain_call.PlainCall._run_in_order, 'use_stream(run.stream)', P.layers_make_tensors),
        (
            run.Run._prepare,
            'workers.copy_streams(device, len(self._batches))',
            P.copies_overlap_with_computation,
            'mutated([current_stream(device)] * len(self._batches))',
        ),
        (
            plain_call.PlainCall._copy,
            'prev_run.copy_streams[i], next_run.copy_streams[i]',
            P.copies_overlap_with_computation,
            'mutated(prev_run.stream), next_run.stream',
        ),
        (
            workers.Workers.copy_streams,
            'new_stream(device)',
            P.copies_overlap_with_computation,
            'mutated((streams or [new_stream(device)])[0])',
        ),
        (
            streams.new_stream,
            'torch.Stream(device)',
            P.copies_overlap_with_computation,
            'mutated(current_stream(device))',
        ),
        (
            streams.current_stream,
            'torch.accelerator.current_stream(device)',
            P.side_streams_without_grad,
            'mutated.default(device)',
        ),
        (
            streams.use_device,
            'torch.accelerator.device_index(device.index)',
            P.layers_are_profiled,
        ),
        (
            streams._Current.__enter__,
            'torch.accelerator.current_device_index()',
            P.layers_make_tensors,
            'mutated(self._stream.device.index)',
        ),
        (
            streams._Current.__enter__,
            'torch.accelerator.current_stream(self._stream.device)',
            P.without_grad,
            'mutated(self._stream)',
        ),
        (
            streams._Current.__enter__,
            'torch.accelerator.set_stream(self._stream)',
            P.copies_overlap_with_computation,
        ),
        (streams._Current.__exit__, 'torch.accelerator.set_stream(self._before)', P.without_grad),
        (
            streams._Current.__exit__,
            'torch.accelerator.set_device_index(self._device)',
            P.layers_make_tensors,
        ),
        # Inputs that wait on the host
        (offload.Offload.store, 'wait_stream(self._stream, compute)', P.inputs_wait_on_the_host),
        (offload.Offload.store, 'use_stream(self._stream)', P.inputs_go_and_come_beside_cells),
        (offload.Offload._to_host, 'record_stream(x, self._stream)', P.inputs_wait_on_the_host),
        (offload.Offload.fetch, 'use_stream(self._stream)', P.inputs_go_and_come_beside_cells),
        (offload.Offload.fetch, 'wait_stream(compute, self._stream)', P.inputs_wait_on_the_host),
        (
            offload.Offload.wait,
            'wait_stream(compute, self._stream)',
            P.kept_results_go_to_the_host_before_a_change,
        ),
        (offload.Offload._to_device, 'record_stream(y, compute)', P.inputs_wait_on_the_host),
        (
            workers.Workers.host_stream,
            'new_stream(device)',
            P.inputs_go_and_come_beside_cells,
            'mutated(torch.sim.default_stream(device))',
        ),
        # Tensors that partitions share
        (
            shared.SharedTensors._copy,
            'current_stream(tensor.device)',
            P.parameters_are_shared_without_grad,
            'mutated.default(tensor.device)',
        ),
        (
            shared.SharedTensors._copy,
            'current_stream(device)',
            P.parameters_are_shared_without_grad,
            'mutated.default(device)',
        ),
        (
            shared.SharedTensors._copy,
            '_apply(Wait, home, leaving, tensor)',
            P.parameters_are_shared,
            'mutated(tensor)',
        ),
        (
            shared.SharedTensors._copy,
            '_apply(Wait, arriving, target, copy)',
            P.parameters_are_shared,
            'mutated(copy)',
        ),
        (
            shared.SharedTensors._return_late,
            'put_last(partition.j, phony)',
            P.devices_do_not_wait_for_what_is_shared,
        ),
        (
            shared.SharedTensors._copy_stream,
            'self._engine.workers.copy_streams(device, self._m + 1)[-1]',
            P.devices_do_not_wait_for_what_is_shared,
            'mutated(current_stream(device))',
        ),
        (
            shared.SharedTensors._end,
            'wait_stream(current_stream(device), self._copy_stream(device))',
            P.parameters_are_shared_without_grad,
        ),
        (
            shared.SharedTensors._end,
            'current_stream(device)',
            P.parameters_are_shared_without_grad,
            'mutated.default(device)',
        ),
        # Steps by a schedule
        (scheduled.Step._act, 'use_stream(run.stream)', P.steps_by_a_schedule),
        (
            scheduled.Step._carry,
            'wait_stream(run.stream, run.copy_streams[i])',
            P.steps_by_a_schedule,
        ),
        (
            scheduled.Step._carry,
            'Wait.apply(CPUStream, CPUStream, *tensors)',
            P.steps_with_a_change_in_place,
            'mutated(tensors)',
        ),
        (
            scheduled.Step._copied,
            'run.copy_streams[i], run.stream',
            P.steps_of_a_frozen_start,
            'run.copy_streams[i], mutated(run.copy_streams[i])',
        ),
        (
            scheduled.Step._send,
            'Wait.apply(run.stream, departure, *output)',
            P.steps_by_a_schedule,
            'mutated(output)',
        ),
        (
            scheduled.Step._send_back,
            'wait_stream(run.copy_streams[i], run.stream)',
            P.steps_by_a_schedule,
        ),
        (
            scheduled.Step._send_back,
            'prev_run.stream',
            P.steps_of_a_frozen_start,
            'mutated(prev_run.copy_streams[i])',
        ),
        # Backward: recomputations, samples, and the nodes on the way
        (
            run.Run._prepare,
            'held_alone, stream,',
            P.gradients_accumulate_on_side_streams,
            'held_alone, mutated.default(device),',
        ),
        (
            recomputation.Recomputation._run_again,
            'use_stream(self._stream)',
            P.recomputations_overlap_with_what_comes_before,
        ),
        (recomputation.Recomputation._run_again, 'use_stream(self._stream)', P.hooks_pack_inputs),
        (
            plain_call._recompute_node,
            'output.device',
            P.recomputations_overlap_with_what_comes_before,
            'mutated(torch.device("cpu"))',
        ),
        (
            samples._event,
            'torch.accelerator.current_stream(device).record_event()',
            P.samples_from_another_device,
            'mutated(torch.Event(device))',
        ),
        (
            samples._event,
            'torch.accelerator.current_stream(device)',
            P.samples_from_another_device,
            'mutated(torch.accelerator.current_stream())',
        ),
        (
            plain_call.PlainCall._depart,
            'use_stream(run.copy_streams[i])',
            P.recomputations_overlap_with_what_comes_before,
        ),
        (
            plain_call.PlainCall._depart,
            RECOMPUTE_LATER[0],
            P.recomputations_overlap_with_what_comes_before,
            RECOMPUTE_LATER[1],
        ),
    ]
]
