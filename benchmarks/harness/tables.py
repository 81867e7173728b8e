"""Results of an experiment as rows of a table, with notes."""

from typing import Any

from benchmarks.harness import options
from benchmarks.harness.experiment import OURS
from benchmarks.harness.report import Rows


def number(value: float | None, missing: str = '') -> str:
    """Write a figure with four digits.

    >>> number(411.662), number(0.8527), number(12.3456), number(None, '—')
    ('411.7', '0.853', '12.35', '—')
    """
    if value is None:
        return missing
    return f'{value:.{3 if abs(value) < 1 else 2 if abs(value) < 100 else 1}f}'


def published(value: float | None) -> str:
    """Write a figure as it was published: no digits are cut, or added.

    >>> published(95.862), published(20.3), published(None)
    ('95.862', '20.3', 'out of memory')
    """
    return 'out of memory' if value is None else f'{value:g}'


def is_accelerated(summary: dict[str, Any]) -> bool:
    """Return whether anything was measured on an accelerator."""
    return any(
        not device.startswith('cpu')
        for result in summary['settings']
        for device in result['devices']
    )


def is_simulated(summary: dict[str, Any]) -> bool:
    """Return whether anything was measured on a simulated accelerator."""
    return any(
        options.is_simulated(device)
        for result in summary['settings']
        for device in result['devices']
    )


def experiment_rows(summary: dict[str, Any]) -> Rows:
    """Return the header and the rows: each figure with the published one beside it."""
    settings = summary['settings']
    sources = sorted(
        {source for result in settings for source in result['published']},
        key=lambda source: (source != OURS, source),
    )
    details = list(
        dict.fromkeys(
            name
            for result in settings
            for name in (*result['published_details'], *result['details'])
        )
    )
    header = [
        'setting',
        'batch',
        'chunks',
        f'{summary["figure"]}, {summary["unit"]}',
        *(['published'] if OURS in sources else []),
        'ratio',
        *('published ratio' if source == OURS else source for source in sources),
    ]
    for name in details:
        header += [name, 'published'] if _is_published(settings, name) else [name]
    return header, [_row(result, sources, details, settings) for result in settings]


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
    row += [number(result['published'].get(source, {}).get('ratio'), '—') for source in sources]
    for name in details:
        row.append(number(result['details'].get(name), '—'))
        if _is_published(settings, name):
            figure = result['published_details'].get(name, {}).get(OURS)
            row.append('—' if figure is None else published(figure))
    return row


def _is_published(settings: list[dict[str, Any]], name: str) -> bool:
    return any(name in result['published_details'] for result in settings)


def partition_rows(summary: dict[str, Any]) -> Rows:
    """Return the memory of each partition, where it was measured."""
    parts = ['parameters', 'gradients', 'optimizer', 'activations']
    rows = [
        [
            f'{result["setting"]}, {j}',
            partition['device'],
            *(f'{partition[part] / 2**30:.3f}' for part in parts),
        ]
        for result in summary['settings']
        for j, partition in enumerate(result.get('partitions', []))
    ]
    return ['setting, partition', 'device', *(f'{part}, GiB' for part in parts)], rows


def prediction_rows(summary: dict[str, Any]) -> Rows:
    """Return the header and the rows of predicted ratios, with the published ones beside them."""
    settings = summary['settings']
    names = list(dict.fromkeys(name for result in settings for name in result['ratios']))
    sources = list(dict.fromkeys(name for result in settings for name in result['published']))
    return [
        'setting',
        'partitions',
        'chunks',
        *names,
        *('published' if source == OURS else source for source in sources),
    ], [
        [
            result['setting'],
            str(result['partitions']),
            str(result['chunks']),
            *(number(result['ratios'].get(name), '—') for name in names),
            *(number(result['published'].get(source), '—') for source in sources),
        ]
        for result in settings
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
    settings = summary['settings']
    return [
        *_notes_on_ratios(summary),
        *_notes_on_devices(summary),
        *_notes_on_memory(summary),
        *_notes_on_images(settings),
        *(
            f'{result["setting"]}: {result["reason"].rstrip(".")}.'
            for result in settings
            if 'reason' in result
        ),
    ]


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
    placed = [
        ['cpu:0' if device == 'cpu' else device for device in result['devices']]
        for result in summary['settings']
    ]
    texts = []
    if any(len(set(devices)) < len(devices) for devices in placed):
        texts.append(
            'Partitions share devices, and a device runs one partition at a time. So '
            'speeds are no speed-ups. The memory of each partition is valid.'
        )
    if any(device.startswith('cpu') for devices in placed for device in devices):
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
    memories = {
        device.partition(':')[0] if device.startswith('cpu') else device
        for devices in placed
        for device in devices
    }
    if summary['experiment'].endswith('timeline') and len(memories) == 1:
        texts.append(
            'All partitions share one memory, so nothing is copied, and streams and '
            'portals have no effect.'
        )
    return texts


def _notes_on_images(settings: list[dict[str, Any]]) -> list[str]:
    images = next((result['images'] for result in settings if 'images' in result), None)
    if images is None or images['classes'] == 1000:
        return []
    return [
        f'These images are not ImageNet: {images["classes"]} classes, {images["train"]} images '
        f'for training and {images["val"]} for validation. Their error is not comparable.'
    ]


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
