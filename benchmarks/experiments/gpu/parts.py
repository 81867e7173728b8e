"""The measurements that one device allows, by name."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.experiments.gpu.gpt import compare
from benchmarks.experiments.machine import BLOCKS, timed_block
from benchmarks.experiments.memory import train_keeping_gradients
from benchmarks.experiments.overhead import measure, ratios
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import COPIES, Job, parameters_of
from benchmarks.harness.memory import free_memory, peak_memory, unless_exhausted
from benchmarks.harness.options import Options, is_on_host, is_simulated
from benchmarks.harness.published import EXPERIMENTS
from benchmarks.harness.timing import time_in_turn
from torchgpipe.base.devices import CPU
from torchgpipe.trainer.gpt import GPT2, Sizes
from torchgpipe.trainer.measuring import measure_machine

ROOT = Path(__file__).parents[3]

#: Tests for accelerators: streams, skips, split backwards, schedules, equality of results.
TESTS = (
    'tests/accelerator',
    'tests/skip',
    'tests/engine/test_streams.py',
    'tests/engine/test_gradients_split.py',
    'tests/engine/test_scheduled_modes.py',
    'tests/engine/test_plain_call_equivalence.py',
)

#: Seconds after which tests are stopped.
TESTS_STOP = 150

#: Cells of the engine: width and rows. With the small ones the host is the limit.
CELLS = {'small cells': (8, 4), 'large cells': (2048, 1024)}

#: Partitions and micro-batches of these.
CELLS_SIZE = 4, 8

#: Settings of ResNet-101 that have one device.
RESNET = ('baseline', 'pipeline-1')

ROUNDS = 7


class Measurement(NamedTuple):
    """A measurement.

    Attributes:
        name: Its name in the results.
        measure: Returns its result, given the device and the fraction of the full size.
    """

    name: str
    measure: Callable[[torch.device, float], dict[str, Any]]


def all_parts() -> list[Measurement]:
    """Return all measurements, in their order."""
    return [
        Measurement('machine', _machine),
        Measurement('tests', _tests),
        *(Measurement(name, _cells(*size)) for name, size in CELLS.items()),
        Measurement('GPT', _gpt),
        Measurement('ResNet-101', _resnet),
        *_memories(EXPERIMENTS['amoebanetd-memory']),
        *_memories(EXPERIMENTS['unet-memory']),
    ]


def _machine(device: torch.device, scale: float) -> dict[str, Any]:
    """Measure the machine for plans, and time blocks that it predicts."""
    place = CPU if is_on_host(device) else device
    machine = measure_machine(place)
    blocks = [timed_block(machine, place, *sizes) for sizes in BLOCKS[is_on_host(device)]]
    return {'machine': machine.to_dict(), 'blocks': blocks}


def _cells(width: int, rows: int) -> Callable[[torch.device, float], dict[str, Any]]:
    def measure_cells(device: torch.device, scale: float) -> dict[str, Any]:
        """Time the engine, and loops with and without ``torch.utils.checkpoint``."""
        scaled = [max(4, round(number * scale)) for number in (width, rows)]
        n, m = CELLS_SIZE
        times = measure(n, m, [device] * n, 3 * ROUNDS, *scaled)
        return {
            'width': scaled[0],
            'rows': scaled[1],
            'partitions': n,
            'micro_batches': m,
            'us_per_cell': times,
            'ratio': ratios(times),
        }

    return measure_cells


def _gpt(device: torch.device, scale: float) -> dict[str, Any]:
    """Compare steps of a GPT of 1.5 billion parameters, or of a small one."""
    sizes = GPT2['gpt2-xl']
    if scale < 1:
        sizes = Sizes(vocabulary=64, context=16, width=32, heads=2, depth=8)
    return compare(sizes, device, ROUNDS)


def _memories(experiment: Experiment) -> Iterator[Measurement]:
    """Yield the lines of a table of memory, with all partitions on the one device."""
    for setting in experiment.settings:
        yield Measurement(f'{experiment.name} {setting.name}', _memory(experiment, setting))


def _memory(
    experiment: Experiment, setting: Setting
) -> Callable[[torch.device, float], dict[str, Any]]:
    def measure_memory(device: torch.device, scale: float) -> dict[str, Any]:
        """Measure parameters, gradients, optimizer state, and the peak of a step."""
        number = parameters_of(setting)
        need = 4 * number * COPIES[experiment.optimizer]
        room = _room(device)
        if need > room:
            return {'parameters': number, 'status': 'does not fit', 'model': need, 'room': room}

        def measured() -> dict[str, Any]:
            job = Job(experiment, setting, _options(setting, device, scale))
            return {'status': 'measured', **_memory_of(job, device)}

        return {'parameters': number, **unless_exhausted(measured)}

    return measure_memory


def _memory_of(job: Job, device: torch.device) -> dict[str, Any]:
    for partition, optimizer in zip(job.partitions, job.optimizers):
        for parameter in partition.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its state
    activations = peak_memory(lambda: train_keeping_gradients(job), [device])

    return {
        'model': sum(sum(sizes.values()) for sizes in job.sizes()),
        'activations': activations,
        'batch': job.batch,
        'chunks': job.chunks,
        'resolution': job.resolution,
    }


def _options(setting: Setting, device: torch.device, scale: float) -> Options:
    return Options(
        (setting,),
        (device,),
        scale,
        epochs=2,
        skip_epochs=1,
        dtype=torch.float32,
        compile=False,
        seed=0,
        output='',
    )


def _room(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if is_on_host(device):
        return free_memory()
    free, _ = torch.get_device_module(device).mem_get_info(device)
    size: int = free
    return size


def _resnet(device: torch.device, scale: float) -> dict[str, Any]:
    """Train ResNet-101 with and without a pipeline of one partition, in turn."""
    experiment = EXPERIMENTS['resnet101-speed']
    jobs: dict[str, Job] = {}

    def warmed_up(setting: Setting) -> dict[str, Any]:
        job = Job(experiment, setting, _options(setting, device, scale))
        for _ in range(2):  # These choose algorithms and allocate memory.
            job.step()
        jobs[setting.name] = job
        return {'batch': job.batch, 'chunks': job.chunks}

    rows = {}
    for name in RESNET:
        rows[name] = unless_exhausted(partial(warmed_up, experiment.setting(name)))
    steps = {name: job.step for name, job in jobs.items()}
    for name, seconds in time_in_turn(steps, ROUNDS, [device]).items():
        rows[name]['samples_per_second'] = jobs[name].batch / median(seconds)
    return {'rows': rows, 'resolution': experiment.scaled_resolution(scale)}


def _tests(device: torch.device, scale: float) -> dict[str, Any]:
    """Run tests for accelerators, and return the numbers of their outcomes."""
    if not (ROOT / 'tests').is_dir():
        return {'status': 'not run, because there is no source checkout'}
    if device.type == 'cpu' or is_simulated(device):
        return {'status': 'not run, because the device is no GPU'}
    command = ['pytest', '-q', '--whole', '-n', '4', '-m', 'accelerator', *TESTS]
    try:
        process = subprocess.run(
            [sys.executable, '-m', *command],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TESTS_STOP,
        )
    except subprocess.TimeoutExpired:
        return {'status': f'stopped after {TESTS_STOP} seconds'}
    outcomes = _outcomes(process.stdout)
    if outcomes['passed'] + outcomes['failed'] == 0:
        lines = process.stdout.strip().splitlines() or ['no output']
        return {'failure': f'pytest ran no test (exit code {process.returncode}): {lines[-1]}'}
    return {'command': ' '.join(command), 'status': 'run', **outcomes}


def _outcomes(output: str) -> dict[str, Any]:
    r"""Return the numbers of passed, failed and skipped tests, and the names of failed ones.

    >>> _outcomes('FAILED tests/a.py::test - x\n= 1 failed, 20 passed, 3 skipped in 2.00s =')
    {'passed': 20, 'failed': 1, 'skipped': 3, 'names': ['tests/a.py::test']}
    """
    last = ''
    for line in output.splitlines():
        if re.search(r'\d in [\d.]+s|\d+ passed|\d+ failed', line):
            last = line
    numbers = {name: int(number) for number, name in re.findall(r'(\d+) (\w+)', last)}
    failed = numbers.get('failed', 0) + numbers.get('errors', 0) + numbers.get('error', 0)
    return {
        'passed': numbers.get('passed', 0),
        'failed': failed,
        'skipped': numbers.get('skipped', 0),
        'names': re.findall(r'^(?:FAILED|ERROR) (\S+)', output, re.MULTILINE),
    }
