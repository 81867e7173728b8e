"""Results of an experiment as rows of a table, with notes, and as bars."""

from typing import Any

from benchmarks.harness import options
from benchmarks.harness.charts import Bars, bar
from benchmarks.harness.experiment import OURS
from benchmarks.harness.published import PAPER
from benchmarks.harness.report import Part, Rows
from torchgpipe.schedule.generators import PLAIN_CALL

#: The schedule predicted beside the plain call, and the sources of figures beside predictions.
SHOWN, SOURCES = '1f1b', (OURS, PAPER)


def number(value: float | None, missing: str = '') -> str:
    """Write a figure with four digits.

    >>> number(411.662), number(0.8527), number(12.3456), number(None, '—')
    ('411.7', '0.853', '12.35', '—')
    """
    if value is None:
        return missing
    if abs(value) < 1:
        return f'{value:.3f}'
    return f'{value:.2f}' if abs(value) < 100 else f'{value:.1f}'


def published(value: float | None) -> str:
    """Write a figure as it was published: no digits are cut, or added.

    >>> published(95.862), published(20.3), published(None)
    ('95.862', '20.3', 'out of memory')
    """
    return 'out of memory' if value is None else f'{value:.12g}'


def devices_of(summary: dict[str, Any]) -> set[str]:
    """Return the names of all devices."""
    devices: set[str] = set()
    for result in summary['settings']:
        devices.update(result['devices'])
    return devices


def is_accelerated(summary: dict[str, Any]) -> bool:
    """Return whether anything was measured on an accelerator."""
    return any(not device.startswith('cpu') for device in devices_of(summary))


def is_simulated(summary: dict[str, Any]) -> bool:
    """Return whether anything was measured on a simulated accelerator."""
    return any(map(options.is_simulated, devices_of(summary)))


def sources_of(summary: dict[str, Any]) -> list[str]:
    """Return the sources of published figures, the reproduced one first."""
    sources: set[str] = set()
    for result in summary['settings']:
        sources.update(result['published'])
    return sorted(sources, key=lambda source: (source != OURS, source))


def experiment_rows(summary: dict[str, Any]) -> Rows:
    """Return the header and the rows: each figure with the published one beside it."""
    settings = summary['settings']
    sources = sources_of(summary)
    details: dict[str, None] = {}
    for result in settings:
        details |= dict.fromkeys([*result['published_details'], *result['details']])

    header = ['setting', 'batch', 'chunks', f'{summary["figure"]}, {summary["unit"]}']
    if OURS in sources:
        header.append('published')
    header.append('ratio')
    for source in sources:
        header.append('published ratio' if source == OURS else source)
    for name in details:
        header += [name, 'published'] if _is_published(settings, name) else [name]
    return header, [_row(result, sources, [*details], settings) for result in settings]


def _row(
    result: dict[str, Any], sources: list[str], details: list[str], settings: list[dict[str, Any]]
) -> list[str]:
    row = [
        result['setting'],
        str(result['batch']),
        str(result['chunks']),
        number(result['figure'], result['status']),
    ]
    if OURS in sources:
        row.append(published(result['published'][OURS]['figure']))
    row.append(number(result['ratio'], '—'))
    for source in sources:
        row.append(number(result['published'].get(source, {}).get('ratio'), '—'))
    for name in details:
        row.append(number(result['details'].get(name), '—'))
        if _is_published(settings, name):
            figure = result['published_details'].get(name, {}).get(OURS)
            row.append('—' if figure is None else published(figure))
    return row


def experiment_parts(summary: dict[str, Any]) -> list[Part]:
    """Return the table of an experiment, a table of its partitions if it has one, and notes."""
    parts: list[Part] = [experiment_rows(summary)]
    if partition_rows(summary)[1]:
        parts.append(partition_rows(summary))
    return [*parts, *notes(summary)]


def experiment_bars(summary: dict[str, Any]) -> list[Bars]:
    """Return bars of ratios. Small runs on the CPU are no result that bars could stand for."""
    has_ratios = any(result['ratio'] for result in summary['settings'])
    if has_ratios and (summary['scale'] >= 1 or is_accelerated(summary)):
        return [ratio_bars(summary)]
    return []


def ratio_bars(summary: dict[str, Any]) -> Bars:
    """Return a bar for each setting and source."""
    settings = summary['settings']
    series = {'this run': [bar(result['ratio'], _reason(result)) for result in settings]}
    for source in sources_of(summary):
        bars = []
        for result in settings:
            figures = result['published'].get(source, {'figure': 0, 'ratio': None})
            missing = 'out of memory' if figures['figure'] is None else '—'
            bars.append(bar(figures['ratio'], missing))
        if any(length for length, _ in bars):
            series[source] = bars
    return Bars(
        summary['experiment'] + _caveat(summary),
        f'{summary["figure"]}, relative to {summary["baseline"]}',
        [result['setting'] for result in settings],
        series,
    )


def _reason(result: dict[str, Any]) -> str:
    """Return why a run has no ratio."""
    return '—' if result['figure'] else str(result['status'])


def _caveat(summary: dict[str, Any]) -> str:
    """Return text beside the title for simulated devices, and below it for a scaled run."""
    text = f', on a {options.NAME}' if is_simulated(summary) else ''
    if summary['scale'] >= 1:
        return text
    return (
        f'{text}, at scale {summary["scale"]:g}\n'
        'this run shows that all of it works, not how it does at full scale'
    )


def _is_published(settings: list[dict[str, Any]], name: str) -> bool:
    return any(name in result['published_details'] for result in settings)


#: Parts of the memory of a partition.
PARTS = ('parameters', 'gradients', 'optimizer', 'activations')


def partition_rows(summary: dict[str, Any]) -> Rows:
    """Return the memory of each partition, where it was measured."""
    rows = []
    for result in summary['settings']:
        for j, partition in enumerate(result.get('partitions', [])):
            sizes = [f'{partition[part] / 2**30:.3f}' for part in PARTS]
            rows.append([f'{result["setting"]}, {j}', partition['device'], *sizes])
    return ['setting, partition', 'device', *(f'{part}, GiB' for part in PARTS)], rows


def prediction_parts(summary: dict[str, Any]) -> list[Part]:
    """Return predicted ratios, with the published ones beside them, and notes on their limits."""
    return [prediction_rows(summary), *prediction_notes(summary)]


def prediction_rows(summary: dict[str, Any]) -> Rows:
    """Return the header and the rows of predicted ratios, with the published ones beside them."""
    settings = summary['settings']
    names: dict[str, None] = {}
    sources: dict[str, None] = {}
    for result in settings:
        names |= dict.fromkeys(result['ratios'])
        sources |= dict.fromkeys(result['published'])
    header = ['setting', 'partitions', 'chunks', *names]
    for source in sources:
        header.append('published' if source == OURS else source)
    rows = []
    for result in settings:
        row = [result['setting'], str(result['partitions']), str(result['chunks'])]
        row += [number(result['ratios'].get(name), '—') for name in names]
        row += [number(result['published'].get(source), '—') for source in sources]
        rows.append(row)
    return header, rows


def prediction_bars(summary: dict[str, Any]) -> list[Bars]:
    """Return bars of predicted and published ratios."""
    settings = summary['settings']
    series = {}
    for name in (PLAIN_CALL, SHOWN):
        series[f'predicted: {name}'] = [bar(result['ratios'].get(name)) for result in settings]
    for source in SOURCES:
        if any(source in result['published'] for result in settings):
            series[source] = [bar(result['published'].get(source)) for result in settings]
    return [
        Bars(
            f'{summary["experiment"]}, predicted and published',
            f'throughput, relative to {summary["baseline"]}',
            [result['setting'] for result in settings],
            series,
        )
    ]


def prediction_notes(summary: dict[str, Any]) -> list[str]:
    """Return notes on predicted ratios, and on their limits."""
    notes = [
        f"Ratios are samples per second relative to '{summary['baseline']}'. Predicted "
        'ratios come from torchgpipe.plan.simulate and a profile of '
        f'{summary["batch"]} samples of {summary["resolution"]}² in float32 on one device '
        f'({summary["device"]}). They are medians over {summary["profiles"]} profiles. The '
        'prediction assumes one such device per partition. The last columns show published '
        'ratios.',
        "The profile separates each layer's time per micro-batch from its time per sample. "
        'The prediction leaves out copies between devices, the loss and the optimizer. '
        'Schedules with two partitions per device use the balance of torchgpipe.balance. '
        'All others use the published balance.',
        'The omitted costs make published ratios lower than predicted ratios. The gap grows '
        'with the number of partitions. Micro-batches of few samples do not fill a GPU, so '
        'they slow it down more than the profiled core. The rest of the gap comes from '
        'the different processor.',
    ]
    if summary['scale'] < 1:
        notes.append(
            f'At scale {summary["scale"]:g}, images are smaller than in the publications.'
        )
    return notes


def notes(summary: dict[str, Any]) -> list[str]:
    """Return notes for a comparison of these figures with the published ones."""
    texts = [
        *_notes_on_ratios(summary),
        *_notes_on_devices(summary),
        *_notes_on_memory(summary),
        *_notes_on_images(summary),
    ]
    for result in summary['settings']:
        if 'reason' in result:
            texts.append(f'{result["setting"]}: {result["reason"].rstrip(".")}.')
    return texts


def _notes_on_ratios(summary: dict[str, Any]) -> list[str]:
    texts = [
        f"Each ratio is relative to '{summary['baseline']}' of its own source: this run or a "
        'publication.'
    ]
    if not any(result['ratio'] for result in summary['settings']):
        texts = [f"There are no ratios, because '{summary['baseline']}' has no figure."]
    if summary['scale'] < 1:
        texts.append(
            f'At scale {summary["scale"]:g}, images have a size of {summary["resolution"]}², and '
            'batches are small. These figures show that the experiment runs, but do not predict '
            'its performance at full scale.'
        )
    if summary.get('schedule'):
        texts.append(f"Settings with a pipeline train by GPipe.step, '{summary['schedule']}'.")
    if not summary['skip_epochs'] and summary['figure'] == 'throughput':
        texts.append('No epoch was skipped, so the figures include the slow start.')
    return texts


def _notes_on_devices(summary: dict[str, Any]) -> list[str]:
    texts = []
    shared = False
    names = set()
    for result in summary['settings']:
        devices = {'cpu:0' if device == 'cpu' else device for device in result['devices']}
        shared |= len(devices) < len(result['devices'])
        names |= devices
    on_host = {name for name in names if name.startswith('cpu')}
    if shared:
        texts.append(
            'Partitions share devices, and a device runs one partition at a time. So '
            'speeds are no speed-ups. The memory of each partition is valid.'
        )
    if on_host:
        texts.append(
            'On the CPU, workers share the cores'
            + ('.' if summary.get('schedule') else ', and backward runs in one thread.')
        )
    if is_simulated(summary):
        texts.append(
            'The accelerator is simulated in the memory of the host. Its devices behave as if '
            'each had its own core and as if the host took no time. So times and bubbles describe '
            'a pipeline of such cores, and not of GPUs. Memory is the memory of tensors.'
        )
    memories = len(names - on_host) + bool(on_host)
    if summary['experiment'].endswith('timeline') and memories == 1:
        texts.append(
            'All partitions share one memory, so nothing is copied, and streams and '
            'portals have no effect.'
        )
    return texts


def _notes_on_images(summary: dict[str, Any]) -> list[str]:
    for result in summary['settings']:
        images = result.get('images')
        if images is not None and images['classes'] != 1000:
            return [
                f'These images are not ImageNet: {images["classes"]} classes, {images["train"]} '
                f'images for training and {images["val"]} for validation. Their error is not '
                'comparable.'
            ]
    return []


def _notes_on_memory(summary: dict[str, Any]) -> list[str]:
    how = {result['measured_by'] for result in summary['settings'] if 'measured_by' in result}
    if not how:
        return []
    texts = [
        'Model memory consists of parameters (with buffers), gradients and optimizer state. '
        'Activation memory is the peak of all memory minus the model memory. Both are summed over '
        f'partitions. The measurement uses {" and ".join(sorted(how))}.'
    ]
    if summary['compile'] and 'live tensors' in how:
        texts.append(
            'PyTorch runs compiled layers uncompiled while live tensors are counted. So '
            'this is the memory of the uncompiled layers.'
        )
    return texts
