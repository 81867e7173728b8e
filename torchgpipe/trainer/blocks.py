"""Times of the blocks of a GPT: measured on all processes of this machine, for plans of a mesh."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from torchgpipe.balance import LayerProfile, OperationProfile, Profile
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.plan import (
    Machine,
    ParameterBytes,
    Transformer,
)
from torchgpipe.plan.balance import solve
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, layers, tensor_plan
from torchgpipe.trainer.processes import Processes


class BlockTimer:
    """A process that takes part in steps of small GPTs."""

    def step(self, sizes: Sizes, tensor: int, micro_batch: int, sequence_parallel: bool) -> float:
        """Return the seconds of a micro-batch, without the reduction of gradients."""
        model = self._model(sizes, tensor, sequence_parallel)
        x = torch.zeros(micro_batch * model.chunks, sizes.context, dtype=torch.long)

        def step() -> None:
            model.step(x, x, parallel_cross_entropy)
            model.zero_grad()

        with model.no_sync():
            return self._seconds(step) / model.chunks

    def update(self, sizes: Sizes) -> float:
        """Return the seconds in which gradients are clipped and parameters change, for each."""
        model = self._model(sizes, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for x in model.parameters():
            x.grad = torch.ones_like(x)

        def update() -> None:
            model.clip_grad_norm_(1.0)
            optimizer.step()

        return self._seconds(update) / sum(x.numel() for x in model.parameters())

    def _model(
        self, sizes: Sizes, tensor: int, sequence_parallel: bool = False
    ) -> DistributedGPipe:
        mesh = init_mesh(dist.get_world_size() // tensor, 1, tensor, device_type='cpu')
        with torch.device('meta'):
            module = layers(GPT(sizes))
        return DistributedGPipe(
            module,
            [len(module)],
            mesh=mesh,
            chunks=2,
            checkpoint='never',
            tensor_plan=tensor_plan(sequence_parallel) if tensor > 1 else None,
        )

    def _seconds(self, function: Callable[[], None]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return median(times[1:])


def profiles_of(
    sizes: Sizes,
    devices: int,
    tensors: Iterable[int],
    machine: Machine,
    state: ParameterBytes,
    sequence_parallel: bool = False,
) -> tuple[dict[int, Profile], Machine]:
    """Return profiles of the layers of a GPT, by the number of ranks that share each layer.

    Steps of GPTs are timed on all processes at once: with few blocks and with more, with small
    micro-batches and with large ones. So times include collectives, the runtime, and the
    contention of processes for cores and memory. Sizes follow formulas. The machine is returned
    with a memory at whose speed an update takes the measured time.

    Args:
        sizes: The sizes.
        devices: The number of processes.
        tensors: Numbers of ranks along the tensor axis.
        machine: The machine.
        state: Bytes of a parameter.
        sequence_parallel: Whether several ranks divide a sequence by tokens. Then numbers that do
            not divide it are left out.
    """
    if sequence_parallel:
        tensors = [tensor for tensor in tensors if sizes.context % tensor == 0]
    transformer = Transformer(
        sizes.depth,
        sizes.width,
        sizes.heads,
        sizes.vocabulary,
        sizes.context,
        tied=sizes.tied,
        dtype='float32',
        sequence_parallel=sequence_parallel,
        eager=True,
    )
    profiles = {}
    with Processes(devices, BlockTimer) as group:
        for tensor in tensors:
            small = _times(group, sizes, tensor, 1, sequence_parallel)
            large = _times(group, sizes, tensor, LARGE, sequence_parallel)
            computed = transformer.profile(machine, tensor, LARGE)
            layers = []
            for index, layer in enumerate(computed.layers):
                is_block = 0 < index <= sizes.depth
                layers.append(_timed(layer, small[is_block], large[is_block]))
            profiles[tensor] = replace(computed, layers=tuple(layers))
        update = max(group.call('update', sizes._replace(depth=FEW)))
    return profiles, replace(machine, bandwidth=state.traffic / update)


#: Samples of a large micro-batch.
LARGE = 8

#: Numbers of blocks. In more of them, a block does not find its memory in a cache.
FEW, MANY = 2, 6


def _times(
    group: Processes, sizes: Sizes, tensor: int, batch: int, sequence_parallel: bool
) -> tuple[float, float]:
    """Return the seconds of an embedding or a head, and of a block, for one micro-batch."""

    def seconds(depth: int) -> float:
        """Return the seconds of the slowest rank, with a number of blocks."""
        model = sizes._replace(depth=depth)
        longest: float = max(group.call('step', model, tensor, batch, sequence_parallel))
        return longest

    few, many = seconds(FEW), seconds(MANY)
    block = max(0.0, many - few) / (MANY - FEW)
    return max(0.0, few - FEW * block) / 2, block


def _timed(layer: LayerProfile, small: float, large: float) -> LayerProfile:
    """Return a layer with times: backward takes twice as long as forward."""
    overhead = min(small, max(0.0, small - (large - small) / (LARGE - 1)))
    return replace(
        layer,
        forward_seconds=large / 3,
        backward_seconds=2 * large / 3,
        forward_overhead=overhead / 3,
        backward_overhead=2 * overhead / 3,
        input_share=None,
        weight_share=None,
        operations=share_of(layer, large / 3),
    )


def share_of(layer: LayerProfile, forward: float) -> tuple[OperationProfile, ...]:
    """Return the operations of a layer, whose parts of forward stay the same."""
    ratio = forward / layer.forward_seconds if layer.forward_seconds else 0.0
    operations = []
    for operation in layer.operations:
        operations.append(replace(operation, seconds=operation.seconds * ratio))
    return tuple(operations)


def balance_of(sizes: Sizes, experts: int, tokens: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, by the products that a token takes part in.

    So a balance follows from the options alone: the same for a dry run and for a training, on all
    machines.

    Args:
        sizes: The sizes of the model.
        experts: The number of experts of a block, of which a token uses two; 0 without experts.
        tokens: The number of tokens of a sample.
        stages: The number of stages.
    """
    width = sizes.width
    networks = min(2, experts) if experts else 1
    block = (4 + 8 * networks) * width**2 + 2 * tokens * width
    layers = [0, *([block] * sizes.depth), width * sizes.vocabulary]
    return [len(stage) for stage in solve(layers, stages)]
