"""This machine as data: products, memory, attention and links, and GPT blocks as a check."""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.page import Section
from benchmarks.harness.processes import Processes
from benchmarks.harness.report import Rows, cores, describe, output_folder, peak_tflops, write_json
from benchmarks.harness.report import machine as here
from benchmarks.models.gpt import Block, Sizes
from torchgpipe import GPipe
from torchgpipe.base.devices import CPU, accelerator, current_device, is_cpu, synchronize
from torchgpipe.base.errors import table
from torchgpipe.plan import Link, Machine, Transformer
from torchgpipe.plan.transformers import MACHINES
from torchgpipe.schedule import make

#: Sizes of products, on accelerators and on the CPU.
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192), (32, 64, 128, 256, 512, 1024)

#: Bytes of the collectives that are timed.
SMALL, LARGE = 4, 2**24

#: Stages and micro-batches of the steps whose actions are timed.
STAGES, CHUNKS = 4, 8

#: Width, heads, tokens and sequences of the blocks that are timed, on accelerators and on the CPU.
BLOCKS = (
    ((2048, 16, 2048, 4), (4096, 32, 2048, 4), (8192, 64, 2048, 2), (12288, 96, 2048, 1)),
    ((128, 4, 64, 8), (256, 8, 128, 8), (512, 8, 128, 4)),
)


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
    if recorded and device.type == 'cuda':
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
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
    found = {}
    for size in SIZES[is_cpu(device)]:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        multiply = partial(torch.mm, a, b, out=torch.empty_like(a))
        found[size] = 2 * size**3 / seconds(multiply, device, recorded=True)
    return found


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
    return 7 * batch * heads * length**2 * size / seconds(step, device)


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


class Collectives(NamedTuple):
    """The collectives of two processes, as fields of a :class:`~torchgpipe.plan.Machine`."""

    link: Link
    gather_ratio: float
    reduce_scatter_ratio: float

    @classmethod
    def of(cls, group: Processes, large: int = LARGE) -> 'Collectives':
        """Measure the collectives of two processes that have a :class:`Ring`.

        Args:
            group: The processes.
            large: The bytes of a large collective.
        """

        def seconds(collective: str, bytes: int) -> float:
            return max(group.call('seconds', collective, bytes))

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
            gloo = Collectives.of(group)
        return Machine(
            name,
            {'float32': peak},
            tuple((float(size), rate / peak) for size, rate in rates.items()),
            attention(device, torch.float32) / peak,
            os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / len(cores()),
            bandwidth(device, torch.float32),
            seconds(partial(torch.add, torch.ones(1), 1), device),
            0.0,
            gloo.link,
            Link(),
            64,
            split=split_share(device, *BLOCKS[True][0]),
            gather_ratio=gloo.gather_ratio,
            reduce_scatter_ratio=gloo.reduce_scatter_ratio,
        )
    gpu = torch.cuda.get_device_name(device)
    known = MACHINES[next((each for each in MACHINES if each in gpu), 'H100')]
    rates = products(device, torch.bfloat16)
    one = torch.ones(1, device=device)
    tiny = partial(torch.add, one, one, out=torch.empty_like(one))
    peak = (peak_tflops(device) or max(rates.values()) / 1e12) * 1e12
    return Machine(
        name,
        {'bfloat16': peak, 'float32': max(products(device, torch.float32).values())},
        tuple((float(size), rate / peak) for size, rate in rates.items()),
        attention(device, torch.bfloat16) / peak,
        float(torch.cuda.get_device_properties(device).total_memory),
        bandwidth(device, torch.bfloat16),
        seconds(tiny, device, recorded=True),
        seconds(tiny, device),
        known.host,
        known.network,
        known.devices_per_host,
        action_seconds(device),
        split_share(device, *BLOCKS[False][0]),
    )


def timed_block(
    found: Machine, device: torch.device, width: int, heads: int, length: int, batch: int
) -> dict[str, Any]:
    """Time and measure a GPT block, and predict the same."""
    dtype = torch.float32 if is_cpu(device) else torch.bfloat16
    with device:
        block = Block(Sizes(width=width, heads=heads)).to(dtype)
    x = torch.randn(batch, length, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.ones_like(x)

    def step() -> None:
        block(x).backward(grad)
        block.zero_grad(set_to_none=False)

    both, forward = seconds(step, device, 0.3), seconds(partial(block, x), device, 0.3)
    saved: float | None = None
    if not is_cpu(device):
        before = torch.cuda.memory_allocated(device)
        kept = [block(x)]
        saved = torch.cuda.memory_allocated(device) - before
        kept.clear()
    one = (
        Transformer(1, width, heads, 1, length, dtype='float32' if is_cpu(device) else 'bfloat16')
        .profile(found, 1, batch)
        .layers[1]
    )
    return {
        'width': width,
        'tokens': batch * length,
        'forward': forward,
        'backward': both - forward,
        'saved': saved,
        'predicted': {
            'forward': one.forward_seconds,
            'backward': one.backward_seconds,
            'saved': one.activation_bytes,
        },
    }


@click.command()
@click.option(
    '--output',
    default='results',
    show_default=True,
    metavar='DIR',
    help='Where the JSON file goes.',
)
def machine(output: str) -> None:
    """Measure this machine, for plans of a mesh; and predict GPT blocks that are also timed."""
    folder = output_folder(output)
    device = current_device() if accelerator() else CPU
    torch.set_num_threads(1)  # as a rank has, if there are as many as cores
    found = measure_machine(device)
    click.echo(describe(here(), not is_cpu(device)) + '\n\n' + table(*machine_rows(found)))
    checked = [timed_block(found, device, *sizes) for sizes in BLOCKS[is_cpu(device)]]
    click.echo('\n' + table(*block_rows(checked)))
    results = {'machine': found.to_dict(), 'blocks': checked}
    click.echo(f'\n{write_json(folder, "machine", results)}')


def machine_rows(found: Machine) -> Rows:
    """Return a table of a machine."""
    # Links of accelerators take several of them.
    assumed = ', not measured' if 'bfloat16' in found.flops else ''
    rows = [
        [f'products, {dtype}', f'{rate / 1e12:.3g} TFLOP/s at most']
        for dtype, rate in found.flops.items()
    ]
    rows += [[f'  of size {size:.0f}', f'{share:.1%} of it'] for size, share in found.shares]
    rows += [
        ['fused attention', f'{found.attention_share:.1%} of it'],
        ['memory', f'{found.bandwidth / 1e9:.4g} GB/s'],
        ['operation', f'{found.latency * 1e6:.3g} µs, its start {found.launch * 1e6:.3g}'],
        [
            f'link on a host{assumed}',
            f'{found.host.bandwidth / 1e9:.3g} GB/s, {found.host.latency * 1e6:.3g} µs',
        ],
    ]
    if found.gather_ratio != 1 or found.reduce_scatter_ratio != 1:
        rows.append(
            [
                'of half an all-reduce',
                f'an all-gather {found.gather_ratio:.2f}, a reduce-scatter '
                f'{found.reduce_scatter_ratio:.2f}',
            ]
        )
    if found.actions:
        times = [f'{kind} {seconds * 1e6:.0f}' for kind, seconds in found.actions.items()]
        rows.append(['action of a stage, at least', f'{", ".join(times)} µs'])
    if found.split:
        rows.append(['split of a backward', f'{found.split:.1%} of it in addition'])
    return ['quantity', 'measured'], rows


def block_rows(rows: list[dict[str, Any]]) -> Rows:
    """Return a table of blocks: predicted / measured."""

    def cell(row: dict[str, Any], name: str, unit: float) -> str:
        measured, predicted = row[name], row['predicted'][name]
        return (
            ''
            if measured is None
            else (
                f'{predicted / unit:.3g} / {measured / unit:.3g}, {predicted / measured - 1:+.0%}'
            )
        )

    return ['width', 'tokens', 'forward, ms', 'backward, ms', 'saved, MiB'], [
        [
            str(row['width']),
            str(row['tokens']),
            cell(row, 'forward', 1e-3),
            cell(row, 'backward', 1e-3),
            cell(row, 'saved', 2**20),
        ]
        for row in rows
    ]


def machine_parts(results: dict[str, Any]) -> list[str | Rows]:
    """Return the parts of a page about a machine and its blocks."""
    found = Machine.from_dict(results['machine'])
    parts: list[str | Rows] = [
        machine_rows(found),
        'Blocks of GPTs, predicted / measured:',
        block_rows(results['blocks']),
    ]
    if 'bfloat16' not in found.flops:
        parts.append(
            'Other operations than products are predicted by their bytes. On a CPU, '
            'arithmetic limits some of them, such as GELU and normalizations, so '
            'predictions are too low. [On a GPU](gpu.md) has a GPU.'
        )
    return parts


COMMANDS = [machine]
SECTION = Section('A machine for plans of a mesh', 'machine', machine_parts)
