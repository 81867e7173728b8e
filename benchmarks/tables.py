"""Results of an experiment as rows of a table, and what has to be said of them."""
from typing import Any, Dict, List, Optional

from benchmarks.experiment import OURS
from benchmarks.report import Rows

__all__ = ['experiment_rows', 'notes', 'number']


def number(value: Optional[float], missing: str = '') -> str:
    """Write a figure with four digits.

    >>> number(411.662), number(0.8527), number(12.3456), number(None, '—')
    ('411.7', '0.853', '12.35', '—')
    """
    if value is None:
        return missing
    return f'{value:.{3 if abs(value) < 1 else 2 if abs(value) < 100 else 1}f}'


def experiment_rows(summary: Dict[str, Any]) -> Rows:
    """Give the header and the rows: each figure with the published one beside it."""
    settings = summary['settings']
    sources = sorted({source for result in settings for source in result['published']},
                     key=lambda source: (source != OURS, source))
    details = list(dict.fromkeys(name for result in settings for name in
                                 (*result['published_details'], *result['details'])))
    header = ['setting', 'batch', 'chunks', f"{summary['figure']}, {summary['unit']}",
              'published', 'ratio', *('published ratio' if source == OURS else source
                                      for source in sources)]
    for name in details:
        header += [name, 'published'] if _is_published(settings, name) else [name]
    return header, [_row(result, sources, details, settings) for result in settings]


def _row(result: Dict[str, Any], sources: List[str], details: List[str],
         settings: List[Dict[str, Any]]) -> List[str]:
    published = result['published'].get(OURS, {'figure': None, 'ratio': None})
    row = [result['setting'], str(result['batch']), str(result['chunks']),
           number(result['figure'], result['status']),
           number(published['figure'], 'out of memory'), number(result['ratio'], '—')]
    row += [number(result['published'].get(source, {}).get('ratio'), '—') for source in sources]
    for name in details:
        row.append(number(result['details'].get(name), '—'))
        if _is_published(settings, name):
            row.append(number(result['published_details'].get(name, {}).get(OURS), '—'))
    return row


def _is_published(settings: List[Dict[str, Any]], name: str) -> bool:
    return any(name in result['published_details'] for result in settings)


def notes(summary: Dict[str, Any]) -> List[str]:
    """Say what a reader has to know before comparing these figures with the published ones."""
    found = [f"ratio: to '{summary['baseline']}' of this run; beside it those of the sources, to "
             'their own.']
    if summary['scale'] < 1:
        found.append(
            f"At scale {summary['scale']:g}, with images of {summary['resolution']}² and small "
            'batches, ratios say that all of it runs, not how fast it is at full scale.')
    placed = [result['devices'] for result in summary['settings']]
    if any(len(set(devices)) < len(devices) for devices in placed):
        found.append('Partitions share devices, which work for one of them at a time: speeds are '
                     'no speed-ups; memory of each partition is valid.')
    if any(device.startswith('cpu') for devices in placed for device in devices):
        found.append('On the CPU workers share the cores, and backward runs in one thread.')
    for result in summary['settings']:
        if 'reason' in result:
            found.append(f"{result['setting']}: {result['reason'].rstrip('.')}.")
    return found
