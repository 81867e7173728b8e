"""This machine as data: products, memory, attention and links, and GPT blocks as a check."""

from functools import partial
from typing import Any

import click
import torch

from benchmarks.harness.options import output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import one_thread
from torchgpipe.base.devices import CPU, accelerator, current_device, is_cpu
from torchgpipe.plan import Machine, Transformer
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.gpt import Block, Sizes
from torchgpipe.trainer.measuring import measure_machine, seconds

#: Width, heads, tokens and sequences of the blocks that are timed, on accelerators and on the CPU.
BLOCKS = (
    ((2048, 16, 2048, 4), (4096, 32, 2048, 4), (8192, 64, 2048, 2), (12288, 96, 2048, 1)),
    ((128, 4, 64, 8), (256, 8, 128, 8), (512, 8, 128, 4)),
)


def timed_block(
    machine: Machine, device: torch.device, width: int, heads: int, length: int, batch: int
) -> dict[str, Any]:
    """Time and measure a GPT block, and predict the same."""
    dtype = torch.float32 if is_cpu(device) else torch.bfloat16
    with device:
        block = Block(Sizes(width=width, heads=heads)).to(dtype)
    x = torch.randn(batch, length, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.ones_like(x)

    def step() -> None:
        block(x).backward(grad)

    both = seconds(step, device, 0.3)
    forward = seconds(partial(block, x), device, 0.3)
    saved: float | None = None
    if not is_cpu(device):
        module = torch.get_device_module(device)
        before = module.memory_allocated(device)
        output = block(x)
        saved = module.memory_allocated(device) - before
        del output

    name = str(dtype).removeprefix('torch.')
    model = Transformer(1, width, heads, 1, length, dtype=name)
    _, predicted, _ = model.profile(machine, 1, batch).layers
    return {
        'width': width,
        'tokens': batch * length,
        'forward': forward,
        'backward': both - forward,
        'saved': saved,
        'predicted': {
            'forward': predicted.forward_seconds,
            'backward': predicted.backward_seconds,
            'saved': predicted.activation_bytes,
        },
    }


@click.command()
@output_option
def machine(output: str) -> None:
    """Measure this machine, for plans of a mesh; and predict GPT blocks that are also timed."""
    folder = output_folder(output)
    device = current_device() if accelerator() else CPU
    with one_thread():  # as in a rank, if there are as many as cores
        measured = measure_machine(device)
        blocks = [timed_block(measured, device, *sizes) for sizes in BLOCKS[is_cpu(device)]]
    results = {'machine': measured.to_dict(), 'blocks': blocks}
    SECTION.publish(results, folder, not is_cpu(device))


def machine_rows(machine: Machine) -> Rows:
    """Return a table of a machine."""
    # Links of accelerators take several of them.
    assumed = ', not measured' if 'bfloat16' in machine.flops else ''
    link = machine.host
    rows = []
    for dtype, rate in machine.flops.items():
        rows.append([f'products, {dtype}', f'{rate / 1e12:.3g} TFLOP/s at most'])
    for size, share in machine.shares:
        rows.append([f'  of size {size:.0f}', f'{share:.1%} of it'])
    rows += [
        ['fused attention', f'{machine.attention_share:.1%} of it'],
        ['memory', f'{machine.bandwidth / 1e9:.4g} GB/s'],
        ['operation', f'{machine.latency * 1e6:.3g} µs, its start {machine.launch * 1e6:.3g}'],
        [
            f'link on a host{assumed}',
            f'{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} µs',
        ],
    ]
    gather, scatter = machine.gather_ratio, machine.reduce_scatter_ratio
    if (gather, scatter) != (1, 1):
        text = f'an all-gather {gather:.2f}, a reduce-scatter {scatter:.2f}'
        rows.append(['of half an all-reduce', text])
    if machine.actions:
        times = [f'{kind} {seconds * 1e6:.0f}' for kind, seconds in machine.actions.items()]
        rows.append(['action of a stage, at least', f'{", ".join(times)} µs'])
    if machine.split:
        rows.append(['split of a backward', f'{machine.split:.1%} of it in addition'])
    return ['quantity', 'measured'], rows


#: The unit of each prediction of a block.
UNITS = {'forward': 1e-3, 'backward': 1e-3, 'saved': 2**20}


def block_rows(blocks: list[dict[str, Any]]) -> Rows:
    """Return a table of blocks: predicted / measured."""
    rows = []
    for block in blocks:
        row = [str(block['width']), str(block['tokens'])]
        for name, unit in UNITS.items():
            measured, predicted = block[name], block['predicted'][name]
            text = ''
            if measured is not None:
                off = predicted / measured - 1
                text = f'{predicted / unit:.3g} / {measured / unit:.3g}, {off:+.0%}'
            row.append(text)
        rows.append(row)
    return ['width', 'tokens', 'forward, ms', 'backward, ms', 'saved, MiB'], rows


def machine_parts(results: dict[str, Any]) -> list[Part]:
    """Return the parts of a page about a machine and its blocks."""
    machine = Machine.from_dict(results['machine'])
    parts: list[Part] = [
        machine_rows(machine),
        'Blocks of GPTs, predicted / measured:',
        block_rows(results['blocks']),
    ]
    if 'bfloat16' not in machine.flops:
        parts.append(
            'Other operations than products are predicted by their bytes. On a CPU, '
            'arithmetic limits some of them, such as GELU and normalizations, so '
            'predictions are too low. [On a GPU](gpu.md) has a GPU.'
        )
    return parts


SECTION = Section('A machine for plans of a mesh', 'machine', machine_parts)
COMMANDS = [machine]
SECTIONS = [SECTION]
