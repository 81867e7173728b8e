"""The clock: which cell runs when, and on which worker.

Clock ``k`` runs the cells ``(i, j)`` with ``i + j = k``, each on its partition's device, at the
same time. With ``m = 4`` micro-batches and ``n = 3`` partitions::

    clock          0     1     2     3     4     5
    partition 0   0,0   1,0   2,0   3,0
    partition 1         0,1   1,1   2,1   3,1
    partition 2               0,2   1,2   2,2   3,2

A clock starts when all cells of the clock before were handed back, so whoever runs a cell is the
only one to touch its micro-batch.
"""
import math
from functools import partial
from queue import SimpleQueue
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from torchgpipe.ambient import Ambient
from torchgpipe.cell import Cells
from torchgpipe.copy import Copy
from torchgpipe.microbatch import Batch
from torchgpipe.randomness import Quiet, cpu_state
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout
from torchgpipe.skip.tracker import SkipTrackerThroughPortals
from torchgpipe.stream import AbstractStream, current_stream, use_device
from torchgpipe.worker import Result, Task, Workers, device_key

__all__ = ['Pipeline', 'clock_cycles']

Cell = Tuple[int, int]
Failure = Tuple[int, BaseException]


def clock_cycles(m: int, n: int) -> Iterator[List[Cell]]:
    """Yield, clock by clock, the cells ``(i, j)`` that run at the same time.

    >>> list(clock_cycles(m=3, n=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Args:
        m: Number of micro-batches.
        n: Number of partitions.

    Yields:
        ``m + n - 1`` lists, partitions ascending within each (Huang et al., "GPipe", 2019).
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]


class Pipeline:
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    >>> from torchgpipe.microbatch import gather, scatter
    >>> batches = scatter(torch.ones(4, 2), chunks=2)
    >>> partitions = [nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]
    >>> Pipeline(batches, partitions).run()
    >>> gather(batches).shape
    torch.Size([4, 2])

    Args:
        batches: The micro-batches; :meth:`run` replaces each by its output.
        partitions: One after the other.
        devices: One per partition; all on the CPU by default.
        copy_streams: ``copy_streams[j][i]`` carries micro-batch ``i`` into or out of partition
            ``j``; made by the workers if missing.
        skip_layout: Which skips go from which partition to which; looked up in the layers if
            missing.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
        workers: Threads to use; by default the pipeline's own, which end with :meth:`run`.
        quiet: What is known about partitions that draw random numbers.
    """

    def __init__(self, batches: List[Batch], partitions: Iterable[nn.Sequential],
                 devices: Optional[Sequence[torch.device]] = None,
                 copy_streams: Optional[Sequence[Sequence[AbstractStream]]] = None,
                 skip_layout: Optional[SkipLayout] = None, checkpoint_stop: int = 0, *,
                 workers: Optional[Workers] = None, quiet: Optional[Quiet] = None) -> None:
        self._batches = batches
        self._partitions = list(partitions)
        if skip_layout is None:
            skip_layout = inspect_skip_layout(self._partitions)
        self._skip_layout = skip_layout
        self._trackers = [SkipTrackerThroughPortals(skip_layout) for _ in batches]
        self._devices = list(devices or [torch.device('cpu')] * len(self._partitions))
        self._keys = [device_key(device) for device in self._devices]
        self._workers = workers or Workers()
        self._owns_workers = workers is None
        self._quiet = quiet or Quiet()
        self._failed_at: float = math.inf
        self._ambient = Ambient.capture()
        n = len(self._partitions)
        self._memories = ['cpu' if key[0] == 'cpu' else key for key in self._keys]
        self._moves = [j > 0 and self._apart(j - 1, j) for j in range(n)]
        self._fenced = [moves or bool(skip_layout.incoming(j))
                        for j, moves in enumerate(self._moves)]
        if copy_streams is None and len(set(self._memories)) > 1:
            copy_streams = [self._workers.copy_streams(device, len(batches))
                            for device in self._devices]
        self._copy_streams = copy_streams or []
        self._cells = [self._make_cells(j, checkpoint_stop) for j in range(n)]
        self._alone = len(set(self._keys)) <= 1
        self._modes = [] if self._alone else [
            self._quiet.key(j, partition) for j, partition in enumerate(self._partitions)]
        self._is_quiet = [mode in self._quiet for mode in self._modes]

    def _apart(self, j: int, k: int) -> bool:
        """Tell whether two partitions are in different memories."""
        return self._memories[j] != self._memories[k]

    def _make_cells(self, j: int, checkpoint_stop: int) -> Cells:
        arrive = self._moves[j] or any(
            self._apart(prev_j, j) for prev_j, _ in self._skip_layout.incoming(j))
        depart = any(self._moves[j + 1:j + 2]) or any(
            self._apart(j, next_j) for next_j, _ in self._skip_layout.outgoing(j))
        return Cells(j, self._partitions[j], self._devices[j], self._trackers, self._skip_layout,
                     checkpoint_stop, current_stream(self._devices[j]),
                     self._copy_streams[j] if arrive else None,
                     self._copy_streams[j] if depart else None)

    def run(self) -> None:
        """Run all cells; afterwards the batches hold the outputs.

        Raises:
            BaseException: What a cell raised, the first in clock order. Cells after it are not
                started; those that ran beside it have ended.
        """
        try:
            for schedule in clock_cycles(len(self._batches), len(self._partitions)):
                self.fence(schedule)
                self.compute(schedule)
        finally:
            self._ambient.repair()
            for tracker in self._trackers:
                tracker.clear()
            if self._owns_workers:
                self._workers.stop()

    def fence(self, schedule: Sequence[Cell]) -> None:
        """Copy skips and batches into the partitions that need them.

        See ``cell.py`` for the waits. A batch that stays in its memory is left as it
        is. A skip is handed on once, from its source straight to its destination.
        """
        for i, j in schedule:
            if not self._fenced[j]:
                continue
            batch = self._batches[i]
            for prev_j, ns, name in self._skip_layout.copy_policy(j):
                self._trackers[i].copy(batch, *self._streams(i, prev_j, j), ns, name)
            if self._moves[j]:
                batch[:] = Copy.apply(  # type: ignore[no-untyped-call]
                    *self._streams(i, j - 1, j), *batch)

    def _streams(self, i: int, prev_j: int, next_j: int) -> Tuple[AbstractStream, AbstractStream]:
        """Give the streams on which micro-batch ``i`` goes from one partition to another."""
        if self._apart(prev_j, next_j):
            return self._copy_streams[prev_j][i], self._copy_streams[next_j][i]
        return self._cells[prev_j].stream, self._cells[next_j].stream

    def compute(self, schedule: Sequence[Cell]) -> None:
        """Run the cells of one clock."""
        # On one device nothing can run at the same time, so a thread would only make its caller
        # wait, and cost as much as several small layers.
        if self._alone:
            with use_device(self._devices[0]):
                for i, j in schedule:
                    self._batches[i] = self._cells[j].run(i, self._batches[i])
        elif len(schedule) == 1:
            self._dispatch([schedule])
        elif all(self._is_quiet[j] for _, j in schedule):
            self._compute_at_once(schedule)
        else:
            self._compute_in_turn(schedule)

    def _compute_at_once(self, schedule: Sequence[Cell]) -> None:
        groups: Dict[Any, List[Cell]] = {}
        for i, j in schedule:
            groups.setdefault(self._keys[j], []).append((i, j))
        before = cpu_state()
        self._dispatch(list(groups.values()), quiet=True)
        if not torch.equal(before, cpu_state()):
            self._distrust(schedule)

    def _distrust(self, schedule: Sequence[Cell]) -> None:
        """Deal with a partition that was thought not to draw random numbers, and did."""
        for _, j in schedule:
            self._quiet.distrust(self._modes[j])
            self._is_quiet[j] = False
        raise RuntimeError(
            f'the partitions {[j for _, j in schedule]} ran at the same time, and one of them '
            "drew from the CPU's random generator, which none had done before in this mode: the "
            'numbers would differ from run to run, and from those that a recomputation draws. '
            'From now on they run in turn: call the model again; or put all partitions on one '
            "device, as in devices=['cpu', 'cpu']. If it was another thread of your program that "
            'drew, give it a torch.Generator.')

    def _compute_in_turn(self, schedule: Sequence[Cell]) -> None:
        for i, j in schedule:
            before = cpu_state()
            self._dispatch([[(i, j)]])
            self._quiet.learn(self._modes[j], quiet=torch.equal(before, cpu_state()))
            self._is_quiet[j] = self._modes[j] in self._quiet

    def _dispatch(self, groups: Sequence[Sequence[Cell]], quiet: bool = False) -> None:
        """Give each worker its cells, and wait for all of them."""
        replies: List[SimpleQueue[Result]] = []
        try:
            for group in groups:
                j = group[0][1]
                replies.append(SimpleQueue())
                self._workers.submit(self._devices[j], Task(
                    self._cells[j].stream, compute=partial(self._run_group, group, quiet),
                    finalize=None, reply=replies[-1], ambient=self._ambient))
            # The last to start is most likely the last to end: to wait for it first is to be woken
            # up once, not once for each worker, and a wake-up costs as much as a small layer.
            error = _first_error([reply.get() for reply in reversed(replies)])
        except BaseException:
            # KeyboardInterrupt, most likely: what is under way has to end before anyone goes on.
            self._failed_at = -1
            self._workers.stop()
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # or its traceback, this frame and the error would be a cycle

    def _run_group(self, group: Sequence[Cell], quiet: bool) -> Any:
        """Run the cells of one worker in a clock, up to the first failure."""
        for i, j in group:
            if self._failed_at < j:
                break
            try:
                self._batches[i] = self._cells[j].run(i, self._batches[i], quiet)
            except BaseException as error:
                self._failed_at = min(self._failed_at, j)
                return j, error
        return None


def _first_error(results: Sequence[Result]) -> Optional[BaseException]:
    """Give the error of the cell that comes first in clock order, if any failed."""
    failures: List[Failure] = [
        # A task that failed outside of its cells has a fault of the library's own.
        (-1, result[1]) if not ok else result[1] for ok, result in results
        if not ok or result[1] is not None]
    return min(failures, key=lambda failure: failure[0])[1] if failures else None
