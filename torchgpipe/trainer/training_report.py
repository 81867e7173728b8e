"""The output of a training: lines of steps in logs, and a report and a picture at its end."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from torchgpipe.base.errors import format_bytes, table
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.plan import Plan
from torchgpipe.timeline import measure
from torchgpipe.trainer.config import Config
from torchgpipe.trainer.gpt import parameter_counts
from torchgpipe.trainer.log import Log, line_of, sample_logs
from torchgpipe.trainer.measuring import peak_tflops
from torchgpipe.trainer.memory_use import peak, reset_peak
from torchgpipe.trainer.ranks import from_first_rank
from torchgpipe.trainer.tokenizer import BYTES, load_tokenizer

T = TypeVar('T')

# Bars need no thread that looks after them.
tqdm.monitor_interval = 0

#: Blue and orange, which differ also for the color-blind, on light and on dark.
COLORS = '#3b6fb6', '#d1803d'

#: Text and lines that can be read on white and on black, as pictures have no background.
NEUTRAL = '#808080'


class Phase(Enum):
    """A part of a training, whose time the report has."""

    #: Until the first step: prediction, model, checkpoint.
    START = 'start'
    #: Samples are read.
    SAMPLES = 'samples'
    #: Forward and backward of all micro-batches, and the reduction of gradients.
    STEP = 'forward and backward'
    #: Gradients are clipped.
    CLIP = 'clipping'
    #: The optimizer changes parameters.
    UPDATE = 'update'
    #: Checkpoints are written.
    SAVE = 'checkpoints'
    #: Validations.
    VALIDATION = 'validation'
    #: Lines are printed and logged.
    LOG = 'log'
    #: A text is generated.
    GENERATE = 'text'


class Report:
    """The report of a training, on all ranks; the first one prints it.

    Args:
        config: The options.
        training: The name of the training.
        mesh: The mesh.
        plan: The settings of the step, and their predicted time and memory.
        start: When the training began, by ``time.perf_counter()``.
    """

    def __init__(self, config: Config, training: str, mesh: Any, plan: Plan, start: float) -> None:
        self._config = config
        self._training = training
        self._plan = plan
        self._device = config.device
        self._is_first = dist.get_rank() == 0
        self.replica: int = mesh.get_local_rank('data')
        self._is_first_of_replica = (
            mesh.get_local_rank('pipe') == mesh.get_local_rank('tensor') == 0
        )

        self._last_lap = start
        self._laps: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        #: The memory in use before there is a model, in bytes.
        self._memory_before = reset_peak(self._device)
        #: The growth of the peak until the end of a step, before any validation.
        self._memory_growth = 0

        total, used = parameter_counts(config.sizes, config.experts)
        self._parameter_count = total
        attention = 12 * config.n_layer * config.n_embd * config.block_size
        self._flops_per_token = 6 * used + attention
        self._peak_tflops = config.peak_tflops or peak_tflops(self._device)

    def begin(
        self, model: DistributedGPipe, step: int, entry: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Open the logs, and print a description of the training.

        Args:
            model: The model.
            step: The step of the checkpoint that is loaded, or 0.
            entry: The entry of this step for the log.

        Returns:
            The entry, if the log does not have it.
        """
        config = self._config
        text = self._describe(model)
        self._first_step = step
        self._log = Log(config.log if self._is_first else '', self._training, step)
        path = ''
        if config.log_samples and self._is_first_of_replica:
            path = f'{config.log}.{self.replica}'
        self._samples = Log(path, self._training, step)
        unlogged = None if self._log.has(step) else entry
        self._tensorboard: Any = None
        if self._is_first:
            if config.log:
                for path in sample_logs(config.log):
                    # Also logs of replicas that this mesh does not have lose later samples.
                    Log(path, self._training, step)
            if config.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                # Later points are of steps that are lost, or that follow again.
                first = step if unlogged else step + 1
                self._tensorboard = SummaryWriter(config.tensorboard, purge_step=first)
            click.echo(text)
            if step:
                click.echo(f'continues after step {step}\n')
        self._bar = tqdm(
            total=config.steps,
            initial=step,
            unit='step',
            disable=None if self._is_first else True,
        )
        self.lap(Phase.START)
        return from_first_rank(unlogged, self._device)  # type: ignore[no-any-return]

    def lap(self, phase: Phase) -> None:
        """Add the time since the last lap, of any phase, to a phase."""
        now = time.perf_counter()
        self._laps[phase].append(now - self._last_lap)
        self._last_lap = now

    def measured(self, model: DistributedGPipe, is_logged: bool) -> AbstractContextManager[Any]:
        """Return a context that measures a step, if it is logged."""
        if not is_logged:
            return nullcontext()
        peak_flops = None
        if self._peak_tflops:
            peak_flops = self._peak_tflops * 1e12
        tokens = self._config.tokens_per_step
        return measure(
            model, tokens=tokens, flops=self._flops_per_token * tokens, peak_flops=peak_flops
        )

    def entry(
        self, step: int, loss: float, norm: float, lr: float, metrics: Any
    ) -> dict[str, Any]:
        """Return the entry of a step for the log."""
        return {
            'step': step,
            'loss': loss,
            'grad_norm': norm,
            'lr': lr,
            'tokens_per_second': metrics.tokens_per_second,
            'seconds': metrics.seconds,
            'tokens_per_second_per_device': metrics.tokens_per_second_per_device,
            'tflops_per_device': metrics.tflops_per_device,
            'mfu': metrics.mfu,
            'peak_memory': metrics.peak_bytes,
            'bubble': metrics.bubble,
        }

    def end_step(self, step: int, starts: list[int]) -> None:
        """Log the samples of a step, at its end."""
        # The optimizer has its state after the first step of this process. Later validations and
        # checkpoints take further memory, which the prediction does not have.
        if step <= self._first_step + 2:
            self._memory_growth = peak(self._device) - self._memory_before
        self._samples.add({'step': step, 'starts': starts})
        self._bar.update()

    def log(self, entry: dict[str, Any]) -> None:
        """Print and log the entry of a step."""
        if self._is_first:
            self._bar.write(line_of(entry), file=sys.stdout)
        self._log.add(entry)
        if self._tensorboard is not None:
            for name, value in entry.items():
                if name != 'step' and value is not None:
                    self._tensorboard.add_scalar(name, value, entry['step'])

    def progress(self, items: Iterable[T], name: str) -> Iterator[T]:
        """Yield items, with a bar on a terminal."""
        disable = None if self._is_first else True
        yield from tqdm(items, name, leave=False, disable=disable)

    def end(self, tokens: list[int]) -> None:
        """Print predictions beside measurements, and where the time went; draw the losses.

        Args:
            tokens: The generated text.
        """
        self.lap(Phase.GENERATE)
        self._bar.close()
        growth = torch.tensor([self._memory_growth], device=self._device)
        dist.all_reduce(growth, dist.ReduceOp.MAX)
        if self._tensorboard is not None:
            self._tensorboard.close()
        lines = self._log.lines
        if not (self._is_first and lines):
            return
        entries = [entry for entry in lines if entry['step'] > self._first_step]
        if entries:
            click.echo(f'\n{self._comparison(entries, int(growth))}')
            click.echo(f'\n{typical_speed(entries)}')
            click.echo(f'\n{times_of_phases(self._laps)}\n')
        for path in draw_if_possible(lambda: draw_losses(lines, Path(self._config.output))):
            click.echo(path)
        if 'val_loss' in lines[-1]:
            click.echo(f'validation loss {lines[-1]["val_loss"]:.4f}\n')
        click.echo(self._text(tokens))

    def _comparison(self, entries: list[dict[str, Any]], growth: int) -> str:
        """Return a table of predictions and measurements of the layers and the loss."""
        seconds = median(self._laps[Phase.STEP])
        bubble = median(entry['bubble'] for entry in entries)
        memory = format_bytes(max(self._plan.bytes.values()))
        if self._config.shard or self._config.offload:
            memory = 'not predicted'
        rows = [
            [
                'forward and backward, ms',
                f'{self._plan.seconds * 1e3:.1f}',
                f'{seconds * 1e3:.1f}',
            ],
            ['bubble', f'{self._plan.bubble:.1%}', f'{bubble:.1%}'],
            ['memory of layers and loss', memory, format_bytes(growth)],
        ]
        return table(['', 'predicted', 'measured'], rows)

    def _text(self, tokens: list[int]) -> str:
        """Return the text of some tokens, or the tokens if they are of no text."""
        config = self._config
        if config.dataset and config.tokenizer:
            return load_tokenizer(config.tokenizer).decode(tokens)
        if config.dataset or config.text:
            return BYTES.decode(tokens)
        return str(tokens)

    def _describe(self, model: DistributedGPipe) -> str:
        """Return the description of model, mesh, micro-batches and prediction."""
        config, plan = self._config, self._plan
        count = 0
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            count += local.numel()
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, count)
        per_rank = f'{count:,} on each'
        if len({*counts}) > 1:
            per_rank = f'by rank {", ".join(f"{count:,}" for count in counts)}'
        checkpoint = 'selective' if plan.keep else plan.checkpoint
        predicted = f'{plan.seconds * 1e3:.1f} ms, bubble {plan.bubble:.1%}'
        if not (config.shard or config.offload):
            predicted += f', {format_bytes(max(plan.bytes.values()))}'
        return (
            f'{self._parameter_count:,} parameters, {per_rank}\n'
            f'mesh of data {config.data} × pipe {config.pipe} × tensor {config.tensor} on '
            f'{self._device.type}, balance {[*plan.balance]}, schedule {plan.schedule}, '
            f'checkpoint {checkpoint}\n'
            f'{config.data} replicas × {config.chunks} micro-batches × '
            f'{config.micro_batch_size} samples × {config.block_size} tokens = '
            f'{config.tokens_per_step:,} tokens per step\n'
            f'predicted for layers and loss: {predicted}\n'
        )


def typical_speed(entries: list[dict[str, Any]]) -> str:
    """Return the medians of speed, as a line."""

    def typical(name: str) -> float:
        middle: float = median(entry[name] for entry in entries)
        return middle

    text = (
        f'median of a step: {typical("tokens_per_second"):,.0f} tokens/s, '
        f'{typical("tokens_per_second_per_device"):,.0f} per device, '
        f'{typical("tflops_per_device"):.3g} TFLOP/s per device'
    )
    if entries[-1]['mfu'] is not None:
        text += f', {typical("mfu"):.1%} MFU'
    return text


def times_of_phases(laps: dict[Phase, list[float]]) -> str:
    """Return a table of the time of each phase on this rank, the longest first."""
    seconds = {phase: sum(times) for phase, times in laps.items() if times}
    total = sum(seconds.values())
    rows = []
    for phase in sorted(seconds, key=seconds.__getitem__, reverse=True):
        rows.append([phase.value, f'{seconds[phase]:.2f}', f'{seconds[phase] / total:.1%}'])
    return table(['where time went', 'seconds', 'share'], rows)


def draw_if_possible(draw: Callable[[], Iterable[Path]]) -> list[Path]:
    """Draw pictures and return their paths; print the reason if that is not possible.

    A picture comes after results, which do not depend on it.
    """
    try:
        return [*draw()]
    except (ImportError, OSError) as error:
        click.echo(f'there is no picture: {error}', err=True)
        return []


def draw_losses(entries: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the losses of all steps; return the paths of a PNG and an SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.8), layout='constrained')
    axes = figure.subplots()
    for key, label, color, style in (
        ('loss', 'training', COLORS[0], '-'),
        ('val_loss', 'validation', COLORS[1], 'o-'),
    ):
        drawn = [entry for entry in entries if key in entry]
        steps = [entry['step'] for entry in drawn]
        losses = [entry[key] for entry in drawn]
        axes.plot(steps, losses, style, label=label, color=color)
    axes.set_xlabel('step', color=NEUTRAL)
    axes.set_ylabel('loss', color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side, spine in axes.spines.items():
        spine.set_color(NEUTRAL)
        spine.set_visible(side in ('left', 'bottom'))
    legend = figure.legend(frameon=False, loc='outside lower center', ncols=2)
    for text in legend.get_texts():
        text.set_color(NEUTRAL)

    paths = [folder / 'train-gpt.png', folder / 'train-gpt.svg']
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], transparent=True, metadata={'Date': None})
    return paths
