"""Machines and transformers as data: the time and memory of operations, by formulas.

An operation reads and writes memory, and computes matrix products. The slower of both decides::

    product (b, m, k, n)     2·b·m·k·n / (peak · share of the size)      size = (m·k·n)^⅓
    memory                   bytes / bandwidth                          + latency of the operation

Collectives are rings: each of ``n`` devices sends and receives ``(n - 1) / n`` of the bytes, twice
in an all-reduce. A group that spans hosts has the slower link: within a host, its ranks share the
work of the network's links, one for each device.

A block is a row of parts. The tensor axis divides parts by heads and features; the other parts
are repeated on each of its ranks, or with sequence parallelism divided by tokens::

    gather ─ norm ─ qkv ─ attention ─ projection ─ reduce ─ norm ─ feed-forward ─ reduce
             tokens  heads and features             tokens          features

A transformer that computes eagerly (``eager``) is one of this library's GPTs, such as the one of
``train-gpt``. Under autocast, sums between blocks are in float32, and products have cached copies
of their weights. The loss of whole scores has their logarithms in float32. Scores that ranks
divide have a loss in blocks of rows: see :mod:`torchgpipe.shard.nn.loss`. So the memory of a plan
is the memory of a dry run.

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (2021), for the operations; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (2022), for the tensors that autograd saves, of which the formulas are
the sums.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import gcd, log, pow
from typing import Any, NamedTuple

from torchgpipe.base.structure import LOSS_BLOCK, LOSS_BLOCKS
from torchgpipe.plan.balance import Profile, positive
from torchgpipe.plan.costs import (
    LayerProfile,
    Link,
    OperationProfile,
    TieProfile,
    check_kinds,
    check_numbers,
)
from torchgpipe.schedule.schedule import KINDS


class Product(NamedTuple):
    """Equal matrix products, each of ``(m, k)`` by ``(k, n)``.

    >>> Product(m=2, k=3, n=4, batch=5).flops
    240
    """

    m: float
    k: float
    n: float
    batch: float = 1

    @property
    def flops(self) -> float:
        """The number of floating-point operations."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def size(self) -> float:
        """The size of the cube that takes as many operations as one of the products."""
        return pow(self.m * self.k * self.n, 1 / 3)

    @property
    def elements(self) -> float:
        """The number of elements of both factors and of the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Machine:
    """Equal devices, several on each host, and the links between them.

    >>> from torchgpipe.plan.transformers import MACHINES, Product
    >>> machine = MACHINES['H100']
    >>> product = Product(8192, 8192, 8192)
    >>> f'{product.flops / machine.product_seconds(product) / 1e12:.0f} TFLOP/s'
    '692 TFLOP/s'
    >>> f'{machine.all_reduce(1e9, 8) * 1e3:.1f} ms, {machine.all_reduce(1e9, 16) * 1e3:.1f} ms'
    '5.3 ms, 5.9 ms'
    """

    #: The name.
    name: str
    #: The peak of matrix products in FLOP/s, by dtype.
    flops: Mapping[str, float]
    #: The part of the peak that a product reaches, by its size, in ascending order. The size is
    #: the edge of a cube with as many operations.
    shares: tuple[tuple[float, float], ...]
    #: The part of the peak that a fused attention reaches.
    attention_share: float
    #: The memory of a device in bytes.
    memory: float
    #: The bytes per second that operations on elements reach.
    bandwidth: float
    #: The seconds of an operation on one number.
    latency: float
    #: The seconds in which the host starts an operation, while the device runs earlier ones.
    launch: float
    #: The link of a device to others of its host.
    host: Link
    #: The link of a device to other hosts.
    network: Link
    #: The number of devices on a host.
    devices_per_host: int = 8
    #: The least seconds of an action of a stage, by its kind. The host needs them to start the
    #: operations, while the device runs earlier actions.
    actions: Mapping[str, float] = field(default_factory=dict)
    #: The part of a backward by which its two halves take longer than the whole, if it is split.
    split: float = 0.0
    #: The time of an all-gather and of a reduce-scatter, relative to half of an all-reduce. Gloo's
    #: reduce-scatter is an all-reduce.
    gather_ratio: float = 1.0
    reduce_scatter_ratio: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self)
        check_kinds('actions', self.actions)
        sizes = [size for size, _ in self.shares]
        rates = [*self.flops.values(), *(share for _, share in self.shares), self.attention_share]
        if not (
            self.flops
            and sizes
            and sizes == sorted({*sizes})
            and min(*rates, self.bandwidth, self.devices_per_host) > 0
        ):
            raise ValueError(
                'a machine has peaks by dtype, shares by ascending sizes, bandwidth, '
                f'and devices_per_host, all above zero, but this is {self}'
            )

    def share(self, size: float) -> float:
        """Return the part of the peak that a product reaches, by its size."""
        k = bisect_left(self.shares, (size,))
        if k in (0, len(self.shares)):
            return self.shares[min(k, len(self.shares) - 1)][1]
        (low, one), (high, other) = self.shares[k - 1 : k + 1]
        return one + (other - one) * log(size / low) / log(high / low)

    def product_seconds(self, product: Product, dtype: str = 'bfloat16') -> float:
        """Return the seconds of matrix products."""
        width = 4 if dtype == 'float32' else 2
        compute = product.flops / (self.peak(dtype) * self.share(product.size))
        return self.latency + max(compute, product.elements * width / self.bandwidth)

    def peak(self, dtype: str) -> float:
        """Return the peak in FLOP/s.

        Raises:
            ValueError: The machine has none for the dtype.
        """
        if dtype not in self.flops:
            raise ValueError(
                f'{self.name} has no peak for {dtype!r}, only for {", ".join(self.flops)}'
            )
        return self.flops[dtype]

    def gather(
        self,
        bytes: float,
        devices: int,
        stride: int = 1,
    ) -> float:
        """Return the seconds of an all-gather to ``bytes``: see :meth:`all_reduce`."""
        return self.gather_ratio * self.all_reduce(bytes, devices, stride) / 2

    def reduce_scatter(
        self,
        bytes: float,
        devices: int,
        stride: int = 1,
    ) -> float:
        """Return the seconds of a reduce-scatter of ``bytes``: see :meth:`all_reduce`."""
        return self.reduce_scatter_ratio * self.all_reduce(bytes, devices, stride) / 2

    def all_reduce(
        self,
        bytes: float,
        devices: int,
        stride: int = 1,
    ) -> float:
        """Return the seconds of an all-reduce of ``bytes`` by a ring.

        A group of ``devices × stride`` neighbours is within a host if this number divides the
        devices of a host. Otherwise, some groups span two hosts.

        Args:
            bytes: The size of the whole.
            devices: The number of devices of the group.
            stride: The distance of one of its devices to the next, such as 8 for the first device
                of each host.
        """
        if not bytes:
            return 0.0
        # Groups are next to each other. The one that hosts divide most unevenly is the slowest.
        local = max(1, gcd(self.devices_per_host, devices * stride) // stride)
        link = self.network if local == 1 else self.host
        if 1 < local < devices:
            link = Link(
                max(self.host.latency, self.network.latency),
                min(self.host.bandwidth, local * self.network.bandwidth),
            )
        return 2 * (devices - 1) * link.seconds(bytes / devices)

    def links(
        self,
        ranks: int,
        stride: int,
        replicas: int = 1,
    ) -> tuple[tuple[Link, ...], ...] | Link:
        """Return the links between ranks of a pipeline: the slowest ones of all replicas.

        Args:
            ranks: The number of ranks.
            stride: The number of devices that share the layers of a rank.
            replicas: The number of pipelines, next to each other.
        """
        #: By rank, the hosts of its devices in all replicas.
        hosts: list[list[int]] = [[] for _ in range(ranks)]
        for device in range(replicas * ranks * stride):
            rank = device // stride % ranks
            hosts[rank].append(device // self.devices_per_host)
        if all(hosts_of_rank == hosts[0] for hosts_of_rank in hosts):
            return self.host
        links = []
        for source in hosts:
            links.append(
                tuple(self.host if source == target else self.network for target in hosts)
            )
        return tuple(links)

    def without_links(self) -> 'Machine':
        """Return the machine with links that take no time."""
        return replace(self, host=Link(), network=Link())

    def to_dict(self) -> dict[str, Any]:
        """Return the machine in types that JSON supports."""
        return {**asdict(self), 'host': self.host.to_dict(), 'network': self.network.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> 'Machine':
        """Return a machine from the result of :meth:`to_dict`.

        Raises:
            ValueError: The dictionary is not a machine.
        """
        try:
            return Machine(
                **{
                    **data,
                    'shares': tuple((*each,) for each in data['shares']),
                    'host': Link.from_dict(data['host']),
                    'network': Link.from_dict(data['network']),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                'this is not a machine, as Machine.to_dict() writes it: '
                f'{type(error).__name__}: {error}'
            ) from None


#: Parts of the share of large products, by size: measured on an H100, whose power is limited; and
#: assumed for others, for a peak of 312 TFLOP/s.
_MEASURED = (128, 0.003), (256, 0.02), (512, 0.12), (1024, 0.50), (2048, 1.0), (8192, 1.0)
_ASSUMED = (
    (128, 0.004),
    (256, 0.03),
    (512, 0.17),
    (1024, 0.55),
    (2048, 0.80),
    (4096, 0.92),
    (8192, 1.0),
)


def shares_of(
    name: str,
    peak: float,
    largest: float,
) -> tuple[tuple[float, float], ...]:
    """Return shares of a machine's peak by size, given the share of large products.

    Products that take as long on a faster machine have the same share there.
    """
    curve, scale = (_MEASURED, 1.0) if name == 'H100' else (_ASSUMED, (peak / 312e12) ** (1 / 3))
    return tuple((round(size * scale), share * largest) for size, share in curve)


# From steps with all partitions on an H100, on the page "On a GPU". Assumed for other machines.
#: The least seconds of an action.
_ACTION = 0.73e-3
#: The part of a backward by which a split one takes longer.
_SPLIT = 0.055


def _machine(
    name: str,
    flops: Mapping[str, float],
    largest: float,
    attention: float,
    memory: float,
    bandwidth: float,
    host: float,
    network: float,
) -> Machine:
    return Machine(
        name,
        flops,
        shares_of(name, flops['bfloat16'], largest),
        attention,
        memory,
        bandwidth,
        1.2e-6,
        1e-5,
        Link(5e-6, host),
        Link(1e-5, network),
        actions=dict.fromkeys(KINDS, _ACTION),
        split=_SPLIT,
    )


#: Machines by their names. Peaks, memories and links are NVIDIA's data, links in one direction.
#: Measured on an H100: shares of products and attention, bandwidth of memory, times of operations.
#: From "Calculon" (Isaev et al., SC'23): shares of the A100's links. Fitted, on the page "Plans
#: against published trainings": shares of products of the A100 and the B200. Others are assumed.
MACHINES = {
    each.name: each
    for each in (
        _machine(
            'A100',
            {'bfloat16': 312e12, 'float32': 19.5e12},
            0.77,
            0.5,
            80 * 2**30,
            0.85 * 2.04e12,
            0.65 * 300e9,
            0.9 * 25e9,
        ),
        _machine(
            'H100',
            {'bfloat16': 989e12, 'float32': 52e12, 'float8': 1979e12},
            0.70,
            0.334,
            80 * 2**30,
            2.97e12,
            0.75 * 450e9,
            0.9 * 50e9,
        ),
        _machine(
            'B200',
            {'bfloat16': 2250e12, 'float32': 75e12, 'float8': 4500e12},
            0.457,
            0.4,
            180e9,
            0.88 * 8e12,
            0.5 * 900e9,
            0.9 * 50e9,
        ),
    )
}


#: Recomputations in backward: of nothing, of a whole stage but for products (``keep='products'``),
#: or of a whole stage.
RECOMPUTATIONS = ('none', 'selective', 'full')

#: The same, and the recomputation of attention within backward, as Korthikanti et al., "Reducing
#: Activation Recomputation in Large Transformer Models" (2022), describe.
ALL_RECOMPUTATIONS = (*RECOMPUTATIONS, 'attention')

#: Recomputations that are actions of the schedule.
SCHEDULED_RECOMPUTATIONS = ('selective', 'full')


class ParameterBytes(NamedTuple):
    """Bytes of a parameter on a rank: itself, its gradient, the state of the optimizer.

    The default is Adam of mixed precision: parameters in bfloat16, gradients, parameters and both
    moments in float32.

    >>> ParameterBytes().on_a_rank('replicate', 8), ParameterBytes().on_a_rank('shard', 8)
    (18.0, 7.5)
    """

    parameter: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0

    @property
    def traffic(self) -> float:
        """The bytes that an update and the norm of gradients read and write, per parameter."""
        return 2 * (self.parameter + self.optimizer) + 3 * self.gradient

    def on_a_rank(
        self,
        data: str,
        replicas: int,
        freed: bool = False,
    ) -> float:
        """Return the bytes of a parameter on each rank during a step.

        With ``'shard'``, parameters are gathered for the step, and gradients are complete until
        they are reduced. A rank's own part of the parameters remains, too. If gradients have more
        bytes than parameters, this part is the optimizer's copy.

        Args:
            data: ``'replicate'`` or ``'shard'``.
            replicas: The number of replicas.
            freed: Whether to leave out gathered parameters.
        """
        own = self.optimizer + (self.parameter if self.parameter >= self.gradient else 0)
        return (
            self.gradient
            + (0 if freed else self.parameter)
            + (own / replicas if data == 'shard' else self.optimizer)
        )


class _Work(NamedTuple):
    """A part of a layer, on one rank, for one micro-batch."""

    #: Matrix products with parameters or activations.
    products: tuple[Product, ...] = ()
    #: The bytes that operations on elements read and write, in forward and backward.
    forward: float = 0.0
    backward: float = 0.0
    #: The bytes that autograd saves.
    saved: float = 0.0
    #: FLOPs of fused attention, in forward.
    attention: float = 0.0
    #: The number of operations in forward.
    operations: int = 1


def _flops(parts: Iterable[_Work]) -> tuple[float, float]:
    """Return the FLOPs of products and of fused attention in forward."""
    products = 0.0
    attention = 0.0
    for part in parts:
        attention += part.attention
        for product in part.products:
            products += product.flops
    return products, attention


class _RankSetup(NamedTuple):
    """The setup of a rank: see the arguments of :meth:`Transformer.profile`."""

    machine: Machine
    tensor: int
    micro_batch: int
    recomputation: str
    sharding: str
    overlap: bool


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer that predicts the next token, and how it computes.

    >>> gpt3 = Transformer(layers=96, width=12288, heads=96, vocabulary=51200, length=2048)
    >>> f'{gpt3.parameters / 1e9:.1f} billion, {gpt3.flops(1536) / 1e18:.2f} EFLOP'
    '174.6 billion, 3.39 EFLOP'
    """

    #: The number of blocks.
    layers: int
    #: The features of a token.
    width: int
    #: The heads of queries.
    heads: int
    #: The number of tokens that there are.
    vocabulary: int
    #: The tokens of a sequence.
    length: int
    #: The heads of keys and values; as many as of queries if 0.
    key_heads: int = 0
    #: The features within the feed-forward part; four times the width if 0.
    features: int = 0
    #: Whether the feed-forward part has a gate (SwiGLU), and so three matrices.
    gated: bool = False
    #: Whether the head has the weight of the embedding.
    tied: bool = True
    #: Whether there are embeddings of positions and biases, as in GPT-2.
    biases: bool = True
    #: Whether there is dropout.
    dropout: bool = False
    #: Whether attention is fused (FlashAttention), so that its scores are never in memory.
    fused: bool = True
    #: Whether ranks of the tensor axis divide the other parts by tokens (sequence parallelism).
    sequence_parallel: bool = False
    #: The dtype of products. Activations have it as well, but for an eager transformer.
    dtype: str = 'bfloat16'
    #: Whether it computes as eager PyTorch does, with parameters in float32, under autocast if
    #: products are not in float32, and without dropout. FSDP gathers parameters in the dtype.
    eager: bool = False

    def __post_init__(self) -> None:
        for name in ('layers', 'width', 'heads', 'vocabulary', 'length'):
            positive(getattr(self, name), name)
        positive(self._keys, 'key_heads')
        positive(self._hidden, 'features')
        if self.width % self.heads or self.heads % self._keys:
            raise ValueError(
                'width must be a multiple of heads, and heads of key_heads, but they '
                f'are {self.width}, {self.heads} and {self._keys}'
            )

    @property
    def _keys(self) -> int:
        return self.key_heads or self.heads

    @property
    def _hidden(self) -> int:
        return self.features or 4 * self.width

    @property
    def _inner(self) -> int:
        """The features of the largest product in a block."""
        return self._hidden * (2 if self.gated else 1)

    @property
    def size(self) -> int:
        """The bytes of a number."""
        return 4 if self.dtype == 'float32' else 2

    def block_parameters(self, tensor: int = 1) -> int:
        """Return the number of parameters of a block on each of the ranks that share it."""
        h = self.width
        f = self._hidden
        qkv = h + 2 * self._keys * h // self.heads
        shared = h * qkv + h * h + (3 if self.gated else 2) * h * f
        if not self.biases:
            return shared // tensor + 2 * h
        # Biases of sums over ranks are whole on each of them, and so are norms.
        return (shared + qkv + f) // tensor + 6 * h

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        h = self.width
        ends = self.vocabulary * h * (1 if self.tied else 2) + (
            self.length * h + 2 * h if self.biases else h
        )
        return self.layers * self.block_parameters() + ends

    def flops(self, sequences: float) -> float:
        """Return the FLOPs of a step, without recomputations, as publications count them.

        Matrix products only, attention to all tokens, backward twice as much as forward.
        """
        tokens = sequences * self.length
        h = self.width
        qkv = h + 2 * self._keys * h // self.heads
        block = h * qkv + h * h + (3 if self.gated else 2) * h * self._hidden + 2 * self.length * h
        return 6 * tokens * (self.layers * block + self.vocabulary * h)

    def profile(
        self,
        machine: Machine,
        tensor: int = 1,
        micro_batch: int = 1,
        recomputation: str = 'none',
        sharding: str = 'replicate',
        overlap: bool = False,
    ) -> Profile:
        """Return time and memory of each layer on one rank, for one micro-batch.

        The layers are the embedding, each block, and the head with the loss.

        Args:
            machine: The machine.
            tensor: The number of ranks that divide each layer.
            micro_batch: The number of sequences.
            recomputation: One of ``'none'``, ``'selective'``, ``'full'`` and ``'attention'``.
                Attention that is computed again is part of backward here. Other recomputations
                are not, because the schedule has them.
            sharding: ``'replicate'`` or ``'shard'``, which matters to an eager transformer only.
            overlap: Whether products run concurrently with the collectives beside them, in as many
                steps as there are ranks, so that only the first step takes time of its own.

        Raises:
            ValueError: The ranks cannot share the heads, features or tokens.
        """
        positive(tensor, 'tensor')
        if recomputation not in ALL_RECOMPUTATIONS:
            raise ValueError(
                f'recomputation must be one of {ALL_RECOMPUTATIONS}, but is {recomputation!r}'
            )
        if tensor == 1 and self.sequence_parallel:
            whole = replace(self, sequence_parallel=False)
            return whole.profile(machine, 1, micro_batch, recomputation, sharding, overlap)
        self._check_ranks(tensor)
        setup = _RankSetup(machine, tensor, micro_batch, recomputation, sharding, overlap)
        block = self._block(setup)
        layers = [self._embedding(setup)]
        for k in range(self.layers):
            layers.append(replace(block, name=str(k + 1)))
        layers.append(self._head(setup))
        return Profile(
            tuple(layers),
            (),
            micro_batch,
            8 * micro_batch * self.length,
            machine.name,
            self._ties(tensor),
        )

    def _check_ranks(self, tensor: int) -> None:
        """Check that ranks can share each layer."""
        numbers = {
            'heads': self.heads,
            'key_heads': self._keys,
            'features': self._hidden,
        }
        if self.eager and self.sequence_parallel:
            numbers['tokens'] = self.length
        for name, number in numbers.items():
            if number % tensor:
                raise ValueError(f'{tensor} ranks cannot share {number} {name}')

    def _block(self, setup: _RankSetup) -> LayerProfile:
        """Return a block."""
        machine, t, micro_batch, recomputation, *_ = setup
        n = micro_batch * self.length
        h = self.width
        w = self.size
        output = self._output_bytes(setup)
        exchange = machine.all_reduce(n * h * w, t) / (t if setup.overlap else 1)
        attention = self._attention(n, t, micro_batch)
        parts = [*self._others(n, t, self._size_between(setup)), attention]
        forward, backward, weights = self._seconds(machine, parts)
        split = machine.split * backward  # The halves repeat no collective and no recomputation.
        if not self._splits_backward(t):
            weights = split = 0.0
        saved = sum(part.saved for part in parts)
        if recomputation == 'attention':
            backward += self._seconds(machine, [attention])[0]
            saved -= attention.saved
        backward += 2 * exchange

        parameters = self.block_parameters(t)
        products, scores = _flops(parts)
        forward_exchange, backward_exchange = self._exchanged(setup)
        return LayerProfile(
            '',
            forward + 2 * exchange,
            backward,
            w * parameters,
            0,
            0,
            round(saved),
            output,
            input_share=1 - weights / backward,
            weight_share=(weights + split) / backward,
            backward_bytes=self._backward_bytes(setup),
            largest_parameter=h * self._inner // t,
            cast_bytes=w * parameters if self._is_autocast(setup) else 0,
            forward_flops=products + scores,
            backward_flops=2 * products + 2.5 * scores,
            forward_exchange=forward_exchange,
            backward_exchange=backward_exchange,
            operations=self._products(setup, exchange),
        )

    def _products(self, setup: _RankSetup, exchange: float) -> tuple[OperationProfile, ...]:
        """Return the operations of a block whose results a selective recomputation keeps.

        They are the products, fused attention or the weighted sum of values, and the collective
        after each of two products, which keeps a second result::

            qkv, values, first feed-forward    read by backward as well
            output of attention, second feed-forward, both reduced    not read

        Args:
            exchange: Seconds of a collective after a product.
        """
        machine, t, micro_batch, *_ = setup
        n = micro_batch * self.length
        w = self.size
        h = self.width
        attention = self._attention(n, t, micro_batch)
        seconds = 0.0
        for part in self._others(n, t, self._size_between(setup)):
            for product in part.products:
                seconds += machine.product_seconds(product, self.dtype)
        qkv = (h + 2 * self._keys * h / self.heads) / t
        read = w * n * (qkv + self._inner / t)
        profiles = [
            OperationProfile('aten.mm.default', seconds, round(read + 2 * w * n * h), round(read))
        ]
        if self.fused:
            seconds = (
                attention.attention / 2 / (machine.peak(self.dtype) * machine.attention_share)
            )
            size = round(attention.saved)
            name = 'aten._scaled_dot_product_flash_attention.default'
        else:
            seconds = machine.product_seconds(attention.products[1], self.dtype)
            size = round(w * n * h / t)
            name = 'aten.bmm.default'
        profiles.append(OperationProfile(name, seconds, size, size))
        if t > 1:
            name = '_c10d_functional.all_reduce.default'
            if self.sequence_parallel:
                # The gather before the next product is repeated.
                name = '_c10d_functional.reduce_scatter_tensor.default'
                exchange /= 2
            size = round(2 * w * self._tokens(n, t) * h)
            profiles.append(OperationProfile(name, 2 * exchange, size, 0))
        return tuple(profiles)

    def _backward_bytes(self, setup: _RankSetup) -> int:
        """Return the memory of a block's backward, beside gradients of its input and output.

        It is the most when there is the gradient of the larger matrix in the feed-forward part.
        """
        t = setup.tensor
        n = setup.micro_batch * self.length
        bytes = (4 * self.width + self.size * n) * self._inner / t
        if self.eager and self.sequence_parallel:
            # A gradient of all tokens, and its copy in the order of samples if there are several.
            copies = 1 if setup.micro_batch == 1 else 2
            bytes += copies * self.size * n * self.width
        elif self.eager and not (self._is_autocast(setup) and t > 1):
            # The gradient of the input comes after the one of the output.
            bytes -= self._output_bytes(setup)
        return round(max(0, bytes))

    def _ties(self, t: int) -> tuple[TieProfile, ...]:
        """Return the weight that the embedding and the head share on a rank, if they do."""
        number = self.vocabulary * self.width // t
        return (TieProfile((0, self.layers + 1), self.size * number, number),) * self.tied

    def _is_autocast(self, setup: _RankSetup) -> bool:
        """Return whether products have copies of their weights, in another dtype."""
        return self.eager and self.size < 4 and setup.sharding == 'replicate'

    def _splits_backward(self, t: int) -> bool:
        """Return whether a split backward computes gradients of weights in its second half.

        The engine cannot split a backward through DTensors, and through copies in another dtype.
        """
        return not self.eager or (t == 1 and self.size == 4)

    def _size_between(self, setup: _RankSetup) -> int:
        """Return the bytes of a number between blocks."""
        return 4 if self._is_autocast(setup) else self.size

    def _output_bytes(self, setup: _RankSetup) -> int:
        """Return the bytes of the output of the embedding or a block, on one rank."""
        whole = setup.micro_batch * self.length * self.width * self._size_between(setup)
        return whole // setup.tensor if self.sequence_parallel else whole

    def _tokens(self, n: float, t: int) -> float:
        """Return the tokens of a rank in the parts between collectives."""
        return n / t if self.sequence_parallel else n

    def _attention(
        self,
        n: float,
        t: int,
        batch: int,
    ) -> _Work:
        """Return scores, softmax, dropout and the weighted sum of values for a rank's heads."""
        w = self.size
        s = self.length
        d = self.width / self.heads
        heads = batch * self.heads / t
        if self.fused:
            own = w * n * d * (self.heads + self._keys) / t
            return _Work(
                attention=4 * heads * s * s * d,
                forward=2 * own,
                backward=4 * own,
                saved=w * n * self.width / t + 4 * heads * s,
            )
        scores = heads * s * s
        products = Product(s, d, s, heads), Product(s, s, d, heads)
        mask = self.dropout
        return _Work(
            products,
            forward=scores * (2 * w + (2 * w + 1) * mask),
            backward=scores * (3 * w + (2 * w + 1) * mask),
            saved=scores * (w + (w + 1) * mask),
            operations=2 + mask,
        )

    def _others(
        self,
        n: float,
        t: int,
        between: int,
    ) -> Iterator[_Work]:
        """Yield the parts of a block but for attention.

        Args:
            between: The size of a number between blocks.
        """
        w = self.size
        h = self.width
        f = self._hidden
        own = self._tokens(n, t)
        qkv = (h + 2 * self._keys * h / self.heads) / t
        mask = self.dropout
        for _ in range(2):  # normalization, and the sum with its input
            yield _Work(
                forward=own * h * (5 * w + mask),
                backward=own * h * (6 * w + mask),
                saved=own * h * (between + mask),
                operations=2,
            )
        yield _Work((Product(n, h, qkv),), saved=w * (own * h + n * qkv))
        yield _Work((Product(n, h / t, h),), saved=0 if self.fused else w * n * h / t)
        inner = self._inner / t
        yield _Work(
            (Product(n, h, inner), Product(n, f / t, h)),
            forward=w * n * (inner + f / t),
            backward=w * n * (2 * inner + f / t),
            saved=w * (own * h + n * (inner + f / t)),
            operations=1,
        )

    def _embedding(self, setup: _RankSetup) -> LayerProfile:
        """Return the embedding of tokens, and of positions if there is one."""
        machine, t, micro_batch, *_ = setup
        n = micro_batch * self.length
        w = self.size
        h = self.width
        seconds = machine.latency + 3 * w * n * h / machine.bandwidth
        parameters = w * (self.vocabulary * h // t + (self.length * h if self.biases else 0))
        whole = n * h * self._size_between(setup)
        return LayerProfile(
            '0',
            seconds + machine.all_reduce(n * h * w, t),
            seconds,
            parameters,
            0,
            0,
            round(self._tokens(n, t) * h * self.dropout),
            self._output_bytes(setup),
            # One gradient, before it is added.
            backward_bytes=self._table_bytes(setup, parameters) if self.eager else parameters,
            # The gradient of a table is no product, so the engine does not defer it.
            input_share=1.0 if self.eager else None,
            weight_share=0.0 if self.eager else None,
            largest_parameter=self.vocabulary * h // t,
            forward_exchange=whole if t > 1 else 0,
            backward_exchange=whole if self.sequence_parallel else 0,
        )

    def _table_bytes(self, setup: _RankSetup, parameters: int) -> int:
        """Return the memory of the embedding's backward, or of its forward if that is more.

        Args:
            parameters: The bytes of the parameters.
        """
        n = setup.micro_batch * self.length
        output = self._output_bytes(setup)
        whole = n * self.width * self._size_between(setup)

        backward = parameters
        if setup.sharding == 'shard' and self.size < 4:
            backward *= 3  # in the dtype, and in float32
        if setup.tensor > 1:
            backward += whole  # the gradient without the tokens of other ranks
        if self.sequence_parallel:
            backward += whole  # the gathered gradient of the output

        # Features of tokens, of positions, and their sum.
        forward = 2 * whole + whole // setup.micro_batch
        if setup.recomputation not in SCHEDULED_RECOMPUTATIONS:
            # The output and its gradient are counted. A recomputation has earlier ones as well.
            forward -= 2 * output
        return max(backward, forward)

    def _head(self, setup: _RankSetup) -> LayerProfile:
        """Return the last normalization, the product with the vocabulary, and the loss."""
        machine, t, micro_batch, *_ = setup
        n = micro_batch * self.length
        w = self.size
        h = self.width
        v = self.vocabulary / t
        own = self._tokens(n, t)
        # The loss reads and writes scores several times. Its softmax, in float32, is the output,
        # which is not recomputed. Backward has two gradients of that size at once.
        part = _Work(
            (Product(n, h, v),),
            forward=4 * w * own * h + 24 * n * v,
            backward=6 * w * own * h + 14 * n * v,
            saved=(1 if self.eager else 2) * w * own * h,
            operations=8,
        )
        exchange = machine.all_reduce(n * h * w, t)
        forward, backward, weights = self._seconds(machine, [part])
        split = machine.split * backward
        if not self._splits_backward(t):
            weights = split = 0.0
        backward += exchange

        kept, temporary = self._loss_bytes(n, t)
        products, _ = _flops([part])
        forward_exchange = backward_exchange = 0.0
        if t > 1:
            # The loss exchanges the largest score of each token, and three sums.
            forward_exchange = 16 * n
            backward_exchange = n * h * self._size_between(setup)
        if self.sequence_parallel:
            forward_exchange += n * h * w
            backward_exchange = 2 * n * h * w
        return LayerProfile(
            str(self.layers + 1),
            forward,
            backward,
            round(w * (self.vocabulary * h / t + (2 * h if self.biases else h))),
            0,
            0,
            round(part.saved),
            round(kept),
            input_share=1 - weights / backward,
            weight_share=(weights + split) / backward,
            backward_bytes=round(temporary),
            cast_bytes=round(w * h * v) if self._is_autocast(setup) else 0,
            forward_flops=products,
            backward_flops=2 * products,
            forward_exchange=forward_exchange,
            backward_exchange=backward_exchange,
        )

    def _exchanged(self, setup: _RankSetup) -> tuple[float, float]:
        """Return the bytes that ranks of a block exchange in forward, and in backward.

        ::

            forward     all-reduce after each of two row-wise products
            backward    all-reduce before each of two column-wise products

        With sequence parallelism, a gather and a reduce-scatter take the place of an all-reduce.
        Backward also gathers the inputs of the column-wise products again.
        """
        if setup.tensor == 1:
            return 0.0, 0.0
        elements = setup.micro_batch * self.length * self.width
        of_product = elements * self.size
        if self.sequence_parallel:
            return 4 * of_product, 6 * of_product
        return 2 * of_product, 2 * elements * self._size_between(setup)

    def _loss_bytes(self, n: float, t: int) -> tuple[float, float]:
        """Return the bytes that the loss keeps, and the ones that its backward needs in addition.

        Its gradient has as many bytes as it keeps, and is not counted.
        """
        w = self.size
        v = self.vocabulary / t
        kept = 4 * n * v  # softmax or its logarithm
        if not self.eager:
            return kept, kept
        temporary = kept
        if t > 1:
            kept = w * n * v  # scores
            is_one_block = n * v <= LOSS_BLOCK
            temporary = 0.0
            if w < 4:
                temporary = 4 * n * v / (1 if is_one_block else LOSS_BLOCKS)
        # The gradient of the weight comes when the loss has freed what it keeps. In another dtype,
        # it has a copy in float32, for which the gradient of scores is free.
        weight = 4 * self.width * v - kept
        if w < 4:
            weight = 6 * self.width * v - 2 * kept
        return kept, max(temporary, weight)

    def _seconds(self, machine: Machine, parts: Iterable[_Work]) -> tuple[float, float, float]:
        """Return the seconds of parts in forward, in backward, and for gradients of weights.

        Backward has two products for each. Fused attention computes its scores again in backward:
        five products for two. The host starts operations while the device runs others.
        """
        peak = machine.peak(self.dtype)
        forward = backward = weights = 0.0
        number = 0
        for part in parts:
            number += part.operations + len(part.products) + bool(part.attention)
            fused = part.attention / 2 / (peak * machine.attention_share)  # half is masked
            forward += (
                fused
                + part.forward / machine.bandwidth
                + (part.operations + bool(part.attention)) * machine.latency
            )
            backward += (
                2.5 * fused
                + part.backward / machine.bandwidth
                + (part.operations + bool(part.attention)) * machine.latency
            )
            for x in part.products:
                forward += machine.product_seconds(x, self.dtype)
                backward += machine.product_seconds(Product(x.m, x.n, x.k, x.batch), self.dtype)
                other = machine.product_seconds(Product(x.k, x.m, x.n, x.batch), self.dtype)
                if x.batch == 1:  # a weight, whose gradient is added to earlier ones
                    other += 3 * self.size * x.k * x.n / machine.bandwidth
                    weights += other
                backward += other
        return (
            max(forward, number * machine.launch),
            max(backward, 2 * number * machine.launch),
            weights,
        )
