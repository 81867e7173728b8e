"""Meshes of processes, the contenders on each of them, and the work that these share."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, init_gpt2, layers, tensor_plan

#: The library of the contenders that are compared with the others.
TORCHGPIPE = 'torchgpipe'

#: The libraries of PyTorch by the axes of a mesh that they are for.
PEERS = {
    ('data',): 'DDP',
    ('data', 'shard'): 'FSDP2',
    ('pipe',): 'pipelining',
    ('data', 'pipe', 'shard'): 'pipelining + FSDP2',
}


class Mesh(NamedTuple):
    """The sizes of a mesh.

    Attributes:
        data: The number of replicas.
        pipe: The number of processes that share the layers of a replica.
        tensor: The number of processes that share each layer.
        shard: Whether replicas share parameters and gradients.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    shard: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes, by name."""
        return {'data': self.data, 'pipe': self.pipe, 'tensor': self.tensor}

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.data * self.pipe * self.tensor

    @property
    def kind(self) -> tuple[str, ...]:
        """The names of axes with several processes, and ``'shard'``."""
        return (*(axis for axis, size in self.axes.items() if size > 1), *['shard'] * self.shard)

    def __str__(self) -> str:
        axes = [f'{axis} {size}' for axis, size in self.axes.items() if size > 1]
        return (' × '.join(axes) or 'one process') + ', shard' * self.shard


#: All meshes by their names on the command line.
MESHES = {
    'data2': Mesh(2),
    'data2-shard': Mesh(2, shard=True),
    'pipe2': Mesh(pipe=2),
    'tensor2': Mesh(tensor=2),
    'data4': Mesh(4),
    'data4-shard': Mesh(4, shard=True),
    'pipe4': Mesh(pipe=4),
    'tensor4': Mesh(tensor=4),
    'data2-pipe2-shard': Mesh(2, 2, shard=True),
    'data2-pipe2-tensor2': Mesh(2, 2, 2),
}


class Contender(NamedTuple):
    """A library that trains the model on a mesh."""

    library: str
    mesh: Mesh

    @property
    def name(self) -> str:
        """The name in tables."""
        if self.library == TORCHGPIPE or self.mesh.size == 1:
            return str(self.mesh)
        return f'{self.library}, {self.mesh}'.removesuffix(', shard')

    @property
    def peer(self) -> 'Contender | None':
        """The contender of PyTorch on the same mesh, if there is one."""
        library = PEERS.get(self.mesh.kind)
        return Contender(library, self.mesh) if library else None


#: A loop of plain PyTorch over the micro-batches.
ALONE = Contender('plain PyTorch', Mesh())


class Work(NamedTuple):
    """A mini-batch, and the model that it trains.

    Attributes:
        sizes: The sizes of the GPT.
        batch: The sequences of the mini-batch.
        alone: The sequences of the mini-batch of one process.
        micro_batch: The sequences of a micro-batch.
        accumulated: The number of mini-batches before gradients are reduced, and used.
    """

    sizes: Sizes
    batch: int
    alone: int
    micro_batch: int
    accumulated: int = 1

    @property
    def tokens(self) -> int:
        """The tokens of all mini-batches."""
        return self.batch * self.sizes.context * self.accumulated

    def chunks(self, replicas: int) -> int:
        """Return the number of micro-batches of each replica."""
        return self.batch // replicas // self.micro_batch

    def balance(self, stages: int) -> list[int]:
        """Return the layers of each stage: blocks, the embedding and the head.

        The first and the last stage have the fewest blocks if the numbers differ.
        """
        fewest, more = divmod(self.sizes.depth, stages)
        blocks = [fewest] * stages
        for j in [*range(1, stages - 1), 0, stages - 1][:more]:
            blocks[j] += 1
        return [n + (j == 0) + (j == stages - 1) for j, n in enumerate(blocks)]

    def model(self) -> nn.Sequential:
        """Return the layers, with the same values in each process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = layers(GPT(self.sizes))
            model.apply(partial(init_gpt2, depth=self.sizes.depth))
        return model

    def samples(self, place: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a replica, and the tokens that follow them.

        Args:
            place: The number of the replica.
            replicas: The number of replicas.

        Returns:
            Two tensors of shape (sequences, context).
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            self.sizes.vocabulary, (self.batch, self.sizes.context + 1), generator=generator
        ).chunk(replicas)[place]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def options(self, mesh: Mesh) -> dict[str, Any]:
        """Return the options of a :class:`~torchgpipe.distributed.DistributedGPipe`."""
        return {
            'balance': self.balance(mesh.pipe),
            'chunks': self.chunks(mesh.data),
            'checkpoint': 'never',
            'data': 'shard' if mesh.shard else 'replicate',
            'tensor_plan': tensor_plan() if mesh.tensor > 1 else None,
        }

    def loss_of(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return the mean over tokens."""
        return parallel_cross_entropy(scores, target)


class SmallLayers(Work):
    """Linear layers that are so small that the time of a step is the time of the library.

    The sizes are the ones of :meth:`sizes_for`. A sequence is a number of samples.
    """

    #: The number of layers for each process.
    NUMBER = 20

    @classmethod
    def sizes_for(cls, processes: int) -> Sizes:
        """Return the sizes of the model: 32 samples of 48 features, in 20 layers per process."""
        return Sizes(1, 32, 48, 1, cls.NUMBER * processes, False)

    def balance(self, stages: int) -> list[int]:
        """Return the layers of each stage."""
        return [self.sizes.depth // stages] * stages

    def model(self) -> nn.Sequential:
        """Return the layers, with the same values in each process."""
        width = self.sizes.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*[nn.Linear(width, width) for _ in range(self.sizes.depth)])

    def samples(self, place: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a replica, and what the layers learn to return.

        Returns:
            Two tensors of shape (sequences, samples, features).
        """
        generator = torch.Generator().manual_seed(0)
        shape = self.batch, self.sizes.context, self.sizes.width
        x = torch.randn(shape, generator=generator).chunk(replicas)[place]
        return x, x.sin()

    def loss_of(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return the mean over samples and features."""
        return F.mse_loss(scores, target)
