"""Machines as data: the speed of matrix products, memory and links, and the time of an operation.

An operation reads and writes memory, and computes matrix products. The slower of both decides::

    product (b, m, k, n)     2·b·m·k·n / (peak · share of the size)      size = (m·k·n)^⅓
    memory                   bytes / bandwidth                          + latency of the operation

Collectives are rings: each of ``n`` devices sends and receives ``(n - 1) / n`` of the bytes, twice
in an all-reduce. A group that spans hosts has the slower link: within a host, its ranks share the
work of the network's links, one for each device.
"""
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import log, pow
from typing import Any, NamedTuple

from torchgpipe.plan.costs import Link, check_numbers

__all__ = ['MACHINES', 'Machine', 'Product']


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

    >>> from torchgpipe.plan.machines import MACHINES, Product
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

    def __post_init__(self) -> None:
        check_numbers(self)
        sizes = [size for size, _ in self.shares]
        rates = [*self.flops.values(), *(share for _, share in self.shares), self.attention_share]
        if not (self.flops and sizes and sizes == sorted({*sizes}) and min(
                *rates, self.bandwidth, self.devices_per_host) > 0):
            raise ValueError('a machine has peaks by dtype, shares by ascending sizes, bandwidth, '
                             f'and devices_per_host, all above zero, but this is {self}')

    def share(self, size: float) -> float:
        """Return the part of the peak that a product reaches, by its size."""
        k = bisect_left(self.shares, (size,))
        if k in (0, len(self.shares)):
            return self.shares[min(k, len(self.shares) - 1)][1]
        (low, one), (high, other) = self.shares[k - 1:k + 1]
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
            raise ValueError(f'{self.name} has no peak for {dtype!r}, only for '
                             f'{", ".join(self.flops)}')
        return self.flops[dtype]

    def gather(self, bytes: float, devices: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather to, or a reduce-scatter of, ``bytes``.

        Args:
            bytes: The size of the whole.
            devices: The number of devices of the group.
            stride: The distance of one of its devices to the next, such as 8 for the first device
                of each host.
        """
        local = max(1, self.devices_per_host // stride)
        link = self.network if local == 1 else self.host
        if 1 < local < devices:
            link = Link(max(self.host.latency, self.network.latency), min(
                self.host.bandwidth, local * self.network.bandwidth))
        return (devices - 1) * link.seconds(bytes / devices)

    def all_reduce(self, bytes: float, devices: int, stride: int = 1) -> float:
        """Return the seconds of an all-reduce of ``bytes``: see :meth:`gather`."""
        return 2 * self.gather(bytes, devices, stride)

    def links(self, ranks: int, stride: int) -> tuple[tuple[Link, ...], ...] | Link:
        """Return the links between ranks of a pipeline, of which each is ``stride`` devices away.
        """
        host = [rank * stride // self.devices_per_host for rank in range(ranks)]
        if host[-1] == 0:
            return self.host
        return tuple(tuple(self.host if one == other else self.network for other in host)
                     for one in host)

    def without_links(self) -> 'Machine':
        """Return the machine with links that take no time."""
        return replace(self, host=Link(), network=Link())

    def to_dict(self) -> dict[str, Any]:
        """Return the machine in types that JSON supports."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> 'Machine':
        """Return a machine from the result of :meth:`to_dict`.

        Raises:
            ValueError: The dictionary is not a machine.
        """
        try:
            return Machine(**{**data, 'shares': tuple((*each,) for each in data['shares']),
                              'host': Link(**data['host']), 'network': Link(**data['network'])})
        except (KeyError, TypeError) as error:
            raise ValueError('this is not a machine, as Machine.to_dict() writes it: '
                             f'{type(error).__name__}: {error}') from None


#: Parts of the share of large products, by size: measured on an H100, whose power is limited; and
#: assumed for others, for a peak of 312 TFLOP/s.
_MEASURED = (128, .003), (256, .02), (512, .12), (1024, .50), (2048, 1.), (8192, 1.)
_ASSUMED = (128, .004), (256, .03), (512, .17), (1024, .55), (2048, .80), (4096, .92), (8192, 1.)


def shares_of(name: str, peak: float, largest: float) -> tuple[tuple[float, float], ...]:
    """Return shares of a machine's peak by size, given the share of large products.

    Products that take as long on a faster machine have the same share there.
    """
    curve, scale = (_MEASURED, 1.) if name == 'H100' else (_ASSUMED, (peak / 312e12) ** (1 / 3))
    return tuple((round(size * scale), share * largest) for size, share in curve)


def _machine(name: str, flops: Mapping[str, float], largest: float, attention: float,
             memory: float, bandwidth: float, host: float, network: float) -> Machine:
    return Machine(name, flops, shares_of(name, flops['bfloat16'], largest), attention, memory,
                   bandwidth, 1.2e-6, 1e-5, Link(5e-6, host), Link(1e-5, network))


#: Machines by their names. Peaks, memories and links are NVIDIA's data, links in one direction.
#: Measured on an H100: shares of products and attention, bandwidth of memory, times of operations.
#: From "Calculon" (Isaev et al., SC'23): shares of the A100's links. Fitted, on the page "Plans
#: against published trainings": shares of products of the A100 and the B200. Others are assumed.
MACHINES = {each.name: each for each in (
    _machine('A100', {'bfloat16': 312e12, 'float32': 19.5e12}, .77, .5, 80 * 2 ** 30,
             .85 * 2.04e12, .65 * 300e9, .9 * 25e9),
    _machine('H100', {'bfloat16': 989e12, 'float32': 52e12, 'float8': 1979e12}, .70, .334,
             80 * 2 ** 30, 2.97e12, .75 * 450e9, .9 * 50e9),
    _machine('B200', {'bfloat16': 2250e12, 'float32': 75e12, 'float8': 4500e12}, .457, .4, 180e9,
             .88 * 8e12, .5 * 900e9, .9 * 50e9))}
