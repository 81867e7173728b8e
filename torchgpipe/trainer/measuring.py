"""Measurements of this machine for plans: products, memory, attention, actions and links."""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torchgpipe.base.devices import CPU, accelerator, current_device, is_cpu, synchronize
from torchgpipe.gpipe import GPipe
from torchgpipe.plan import Link, Machine
from torchgpipe.plan.transformers import MACHINES
from torchgpipe.schedule import make
from torchgpipe.trainer.gpt import Block, Sizes
from torchgpipe.trainer.launch import available_cores
from torchgpipe.trainer.processes import Processes

#: Peak TFLOP/s of dense bfloat16 products, from data sheets, by a part of the device's name.
PEAKS = {'A100': 312, 'H100': 989, 'H200': 989, 'B200': 2250, 'MI300X': 1307}

#: Sizes of products, on accelerators and on the CPU.
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192), (32, 64, 128, 256, 512, 1024)

#: Bytes of the collectives that are timed.
SMALL, LARGE = 4, 2**24

#: Stages and micro-batches of the steps whose actions are timed.
STAGES, CHUNKS = 4, 8


def seconds(
    call: Callable[[], object], device: torch.device, least: float = 0.1, recorded: bool = False
) -> float:
    """Return the seconds of a call: the median of several rounds, after some that do not count.

    Args:
        call: The call.
        device: Where it runs.
        least: The seconds of all rounds together.
        recorded: Whether an accelerator replays a graph, so that the host's time does not count.
    """
    module: Any = torch.get_device_module(device)
    if recorded and hasattr(module, 'CUDAGraph'):
        call()
        graph = module.CUDAGraph()
        with module.graph(graph):
            for _ in range(20):
                call()
        return seconds(graph.replay, device, least) / 20

    def round(number: int) -> float:
        synchronize([device])
        start = time.perf_counter()
        for _ in range(number):
            call()
        synchronize([device])
        return (time.perf_counter() - start) / number

    round(2)
    number = max(1, int(least / 5 / max(round(1), 1e-7)))
    return median(round(number) for _ in range(5))


def products(device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Return FLOP/s by the size of square matrices."""
    rates = {}
    for size in SIZES[is_cpu(device)]:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        multiply = partial(torch.mm, a, b, out=torch.empty_like(a))
        rates[size] = 2 * size**3 / seconds(multiply, device, recorded=True)
    return rates


def bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Return the bytes per second of a sum of large tensors, which reads two and writes one."""
    size = 2**20 if is_cpu(device) else 2**26
    a, b = (torch.ones(size, device=device, dtype=dtype) for _ in range(2))
    return 3 * a.nbytes / seconds(partial(torch.add, a, b, out=torch.empty_like(a)), device)


def attention(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a fused, causal attention, forward and backward."""
    batch, heads, length, size = (4, 4, 128, 32) if is_cpu(device) else (4, 32, 2048, 128)
    q, k, v = (
        torch.randn(batch, heads, length, size, device=device).to(dtype).requires_grad_()
        for _ in range(3)
    )

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    # Two products forward, five backward; half of the scores are masked.
    operations = 7 * batch * heads * length**2 * size
    return operations / seconds(step, device)


class Ring:
    """A process that takes part in collectives with another one."""

    def seconds(self, collective: str, bytes: int) -> float:
        """Return the seconds of a collective: the median of some, after one.

        Args:
            collective: ``'all-reduce'``, ``'gather'`` or ``'reduce-scatter'``.
            bytes: The size of the whole.
        """
        whole = torch.ones(bytes // 4)
        parts = [*whole.chunk(dist.get_world_size())]
        part = torch.ones_like(parts[0])
        call = {
            'all-reduce': partial(dist.all_reduce, whole),
            'gather': partial(dist.all_gather, parts, part),
            'reduce-scatter': partial(dist.reduce_scatter, part, parts),
        }[collective]
        times = []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times[1:])


class RingCosts(NamedTuple):
    """The collectives of two processes, as fields of a :class:`~torchgpipe.plan.Machine`."""

    link: Link
    gather_ratio: float
    reduce_scatter_ratio: float

    @classmethod
    def of(cls, group: Processes, large: int = LARGE) -> 'RingCosts':
        """Measure the collectives of two processes that have a :class:`Ring`.

        Args:
            group: The processes.
            large: The bytes of a large collective.
        """

        def seconds(collective: str, bytes: int) -> float:
            longest: float = max(group.call('seconds', collective, bytes))
            return longest

        small = seconds('all-reduce', SMALL)
        half = seconds('all-reduce', large) / 2
        # An all-reduce of two takes twice the latency, and moves half of the bytes twice.
        latency = small / 2
        return cls(
            Link(latency, large / 2 / max(half - latency, 1e-9)),
            seconds('gather', large) / half,
            seconds('reduce-scatter', large) / half,
        )


def action_seconds(device: torch.device) -> dict[str, float]:
    """Return the least seconds of an action of a stage, by its kind.

    The blocks are so small that the host's work takes all the time. A backward and its halves
    have the rest of a step's time.
    """
    sizes = Sizes(width=32, heads=2)
    blocks = nn.Sequential(*(Block(sizes) for _ in range(STAGES))).to(device)
    x = torch.randn(CHUNKS, 16, sizes.width, device=device)
    never, always = (
        GPipe(blocks, [1] * STAGES, devices=[device] * STAGES, chunks=CHUNKS, checkpoint=mode)
        for mode in ('never', 'always')
    )

    def cell(call: Callable[[], object]) -> float:
        return seconds(call, device, 0.3) / (STAGES * CHUNKS)

    forward = cell(lambda: never(x))
    whole, halves, recomputed = (
        cell(partial(model.step, x, x, F.mse_loss, schedule=make(name, STAGES, CHUNKS)))
        for model, name in ((never, '1f1b'), (never, 'zb-h1'), (always, '1f1b'))
    )
    half = max(0.0, halves - forward) / 2
    return {
        'F': forward,
        'B': max(0.0, whole - forward),
        'I': half,
        'W': half,
        'R': max(0.0, recomputed - whole),
    }


def split_share(device: torch.device, width: int, heads: int, length: int, batch: int) -> float:
    """Return the part of a backward by which its two halves take longer than the whole.

    The steps have one stage, so that they differ by the split only. Two thirds of a step are
    backward.
    """
    dtype = torch.float32 if is_cpu(device) else torch.bfloat16
    sizes = Sizes(width=width, heads=heads)
    blocks = nn.Sequential(*(Block(sizes) for _ in range(2))).to(device, dtype)
    x = torch.randn(2 * batch, length, width, device=device, dtype=dtype)
    model = GPipe(blocks, [2], devices=[device], chunks=2, checkpoint='never')
    times: dict[str, list[float]] = {'1f1b': [], 'zb-h1': []}
    for _ in range(5):
        for name, rounds in times.items():
            step = partial(model.step, x, x, F.mse_loss, schedule=name)
            rounds.append(seconds(step, device, 0.1))
    whole, halves = map(median, times.values())
    return max(0.0, halves - whole) / (whole * 2 / 3)


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak of a device for dense bfloat16 products, if it is known."""
    if is_cpu(device):
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measure_machine(device: torch.device | None = None) -> Machine:
    """Measure this machine, with the threads that this process has.

    On an accelerator, links are the ones of its data sheet, because they take several devices.
    """
    device = device or (current_device() if accelerator() else CPU)
    name = 'this machine'
    if is_cpu(device):
        rates = products(device, torch.float32)
        peak = max(rates.values())
        with Processes(2, Ring) as group:
            gloo = RingCosts.of(group)
        return Machine(
            name,
            {'float32': peak},
            tuple((float(size), rate / peak) for size, rate in rates.items()),
            attention(device, torch.float32) / peak,
            os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / len(available_cores()),
            bandwidth(device, torch.float32),
            seconds(partial(torch.add, torch.ones(1), 1), device),
            0.0,
            gloo.link,
            Link(),
            64,
            split=split_share(device, 128, 4, 64, 8),
            gather_ratio=gloo.gather_ratio,
            reduce_scatter_ratio=gloo.reduce_scatter_ratio,
        )
    module: Any = torch.get_device_module(device)
    gpu = module.get_device_name(device)
    name_of_links = 'H100'
    for machine in MACHINES:
        if machine in gpu:
            name_of_links = machine
    links = MACHINES[name_of_links]
    rates = products(device, torch.bfloat16)
    one = torch.ones(1, device=device)
    tiny = partial(torch.add, one, one, out=torch.empty_like(one))
    peak = (peak_tflops(device) or max(rates.values()) / 1e12) * 1e12
    return Machine(
        name,
        {'bfloat16': peak, 'float32': max(products(device, torch.float32).values())},
        tuple((float(size), rate / peak) for size, rate in rates.items()),
        attention(device, torch.bfloat16) / peak,
        float(module.get_device_properties(device).total_memory),
        bandwidth(device, torch.bfloat16),
        seconds(tiny, device, recorded=True),
        seconds(tiny, device),
        links.host,
        links.network,
        links.devices_per_host,
        action_seconds(device),
        split_share(device, 2048, 16, 2048, 4),
    )
