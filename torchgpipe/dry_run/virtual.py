"""Virtual ranks: the ranks of a pipeline as threads of one process, which take turns.

The model, the step and the messages are the ones of :class:`DistributedGPipe`. Layers have fake
tensors, groups of processes are fake, and messages are handed over in memory::

    rank 0    0F0 0F0>1 0F1 0F1>1 ┐                      ┌ 1B0>0 0B0 …
    rank 1                        └ 0F0>1 1F0 0F1>1 1B0 ─┘

A rank runs until it waits for a message or for the facts of the others. Then another one runs.
"""

import pickle
from collections import Counter as Collected
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from threading import Semaphore, Thread
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.context import ThreadState
from torchgpipe.base.private import FakeTensorMode
from torchgpipe.base.structure import size_of
from torchgpipe.distributed.failures import Watch
from torchgpipe.distributed.layers import Values
from torchgpipe.distributed.mesh import MeshInfo
from torchgpipe.distributed.model import DistributedGPipe
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.replicas import Replicas
from torchgpipe.distributed.starts import Start, Starts
from torchgpipe.distributed.steps import Steps
from torchgpipe.distributed.ties import Ties
from torchgpipe.distributed.transport import Header, Messages
from torchgpipe.dry_run.counters import Counter
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.losses import Losses
from torchgpipe.schedule import Action, Schedule
from torchgpipe.schedule.messages import AHEAD, Message, Row, UnitAction
from torchgpipe.shard.collectives import F
from torchgpipe.shard.sums import local

#: How many micro-batches of each kind run. The last send frees as much memory as it takes.
REPEATS = AHEAD + 1


class _Ended(BaseException):
    """Another rank has raised."""


class _Turn:
    """One rank of :class:`Turns`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        #: Whether the rank can go on.
        self.ready: Callable[[], bool] = lambda: True
        self.go = Semaphore(0)
        self.back = Semaphore(0)
        self.error: BaseException | None = None
        self.done = False


class Turns:
    """Functions that run in threads, one at a time, until each waits for another.

    The order depends on nothing but the functions, so results are repeatable.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._now: _Turn | None = None
        self._ends = False

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let other functions run until a condition holds."""
        turn = self._now
        assert turn is not None
        while not ready():
            turn.ready = ready
            turn.back.release()
            turn.go.acquire()
            if self._ends:
                raise _Ended

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run functions to their ends.

        Raises:
            BaseException: The error of the first function that raised.
            RuntimeError: All functions wait.
        """
        state = ThreadState.capture()
        self._turns = [_Turn(function) for function in functions]
        threads = [
            Thread(target=self._serve, args=[turn, state], daemon=True) for turn in self._turns
        ]
        for thread in threads:
            thread.start()
        try:
            while open := [turn for turn in self._turns if not turn.done]:
                able = [turn for turn in open if turn.ready()]
                if not able:
                    raise RuntimeError('all ranks wait for each other')
                for turn in able:
                    self._let(turn)
        finally:
            self._ends = True
            for turn in self._turns:
                if not turn.done:
                    self._let(turn)
            for thread in threads:
                thread.join()

    def _let(self, turn: _Turn) -> None:
        self._now = turn
        turn.go.release()
        turn.back.acquire()
        if turn.error is not None and not self._ends:
            raise turn.error

    def _serve(self, turn: _Turn, state: ThreadState) -> None:
        turn.go.acquire()
        try:
            if not self._ends:
                state.run(turn.run, state.num_threads)
        except _Ended:
            pass
        except BaseException as error:
            turn.error = error
        finally:
            turn.done = True
            turn.back.release()


class Rendezvous:
    """The exchanges between the virtual ranks of one pipeline.

    Some places along the pipe axis have no virtual rank, because they are like another place.
    Their messages have the headers of messages of that place.

    Attributes:
        like: For each place, the place of the virtual rank that stands for it.
        kinds: The kind of each micro-batch: its size, and where it is recomputed.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.headers: dict[Message, Header] = {}
        self.like: list[int] = []
        self.kinds: list[Any] = []
        self.recomputed: Sequence[Collection[int]] = ()
        self.micro_batches: Collection[int] = ()
        self.schedule: Schedule | None = None
        self._facts: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._rounds: defaultdict[int, int] = defaultdict(int)

    def fake(self, x: Tensor) -> Tensor:
        """Return a fake tensor on the CPU in place of a tensor."""
        with self.mode:
            new = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
        new = (
            nn.Parameter(new, x.requires_grad)
            if isinstance(x, nn.Parameter)
            else new.requires_grad_(x.requires_grad)
        )
        new.__dict__.update(x.__dict__)
        return new

    def choose(self, sizes: Sequence[int], recomputed: Sequence[Collection[int]]) -> None:
        """Choose the micro-batches to run: the first ones of each kind."""
        self.recomputed = recomputed
        self.kinds = [
            (size, *(i in again for again in recomputed)) for i, size in enumerate(sizes)
        ]
        seen: Collected[Any] = Collected()
        self.micro_batches = [
            i
            for i, kind in enumerate(self.kinds)
            if not seen.update([kind]) and seen[kind] <= REPEATS
        ]

    def meet(self, place: int, facts: F) -> list[F]:
        """Return the facts of all places."""
        if not self.like:
            return []
        number = self._rounds[place]
        self._rounds[place] += 1
        there = self._facts[number]
        there[place] = facts
        self.turns.wait(lambda: len(there) == len({*self.like}))
        return [there[each] for each in self.like]


class _InFlight:
    """A send or a receive, as of a backend that reports its end only to a rank that waits."""

    def __init__(self, counter: Counter, bytes: int) -> None:
        self._counter = counter
        self._bytes = bytes
        counter.messages += bytes

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._counter.messages -= self._bytes


class VirtualMessages(Messages):
    """The messages of a virtual rank. All ranks know a header when its message is sent."""

    def __init__(self, rank: 'VirtualRank') -> None:
        super().__init__({}, rank.ranks, rank.mesh.device, rank.meeting.headers)
        self._rank = rank

    def send(self, message: Message, header: Header, tensors: Sequence[Tensor]) -> None:
        """Send a message."""
        if header.varies:  # Then each message has a header, in two parts.
            sizes = [torch.long.itemsize, len(pickle.dumps(header))]
            self._rank.counter.sent += [(self._ranks[message.stage], size) for size in sizes]
            header = header._replace(varies=False)
        self._headers.setdefault(message, header)
        super().send(message, header, tensors)

    def receive(self, message: Message) -> None:
        """Wait until a message was sent, and receive it."""
        twin = self._rank.twin(message)
        self._rank.meeting.turns.wait(lambda: twin in self._headers)
        self._headers[message] = self._headers[twin]
        super().receive(message)

    def finish(self) -> None:
        """Wait until all sends have ended, which is no part of the last action."""
        self._rank.counter.at(None)
        super().finish()

    def _put(self, x: Tensor, rank: int) -> None:
        counter = self._rank.counter
        counter.sent.append((rank, x.numel()))
        self._sent[rank][-1].append((_InFlight(counter, x.numel()), x))

    def _get(self, x: Tensor, rank: int) -> Any:
        return _InFlight(self._rank.counter, x.numel())


class VirtualTies(Ties):
    """The tied parameters of a virtual rank."""

    counter: Counter

    def spread(self, device: torch.device) -> None:
        """Check that the copies are split alike; they have no values."""

    def _send(self, x: Tensor, rank: int) -> None:
        self.counter.sent.append((rank, size_of(x)))

    def _receive(self, x: Tensor, rank: int) -> None:
        pass

    def _counts_in(self, x: Tensor, ranks: int) -> list[float]:
        return [ranks] * len(x)


class VirtualReplicas(Replicas):
    """The replicas of a virtual rank. A gather ends at once, so that it counts by itself."""

    def act(self, action: UnitAction) -> None:
        """Gather or free a unit."""
        super().act(action)
        self.enter(action.stage)

    def _order_of_first(self, order: Sequence[str], names: Sequence[str]) -> list[str]:
        """Return the order of this rank. Real replicas exchange it in their first step only."""
        return [*order]


class VirtualRank(Rank):
    """A rank whose layers have fake tensors."""

    _ties_type = VirtualTies
    _replicas_type = VirtualReplicas

    def __init__(self, meeting: Rendezvous, place: int, mesh: MeshInfo, *args: Any) -> None:
        super().__init__(replace(mesh, pipe=mesh.pipe._replace(rank=place)), *args)
        self.meeting = meeting
        self.counter = Counter(meeting.mode)

    def twin(self, message: Message) -> Message:
        """Return the message of a virtual rank with the same header.

        ::

            places      0          1          2          3          2 is like 1
            forward     0F0>1 ───▶ 1F0>2 ───▶ 2F0>3 ───▶            2F0>3 is like 1F0>2
            backward         ◀─── 1B0>0 ◀─── 2B0>1 ◀─── 3B0>2       2B0>1 is like 3B0>2

        It is a message of the stage before in forward, and of the stage after in backward, so that
        no rank waits for itself. Stages between have equal layers.
        """
        (stage, kind, i), to = message
        like = self.meeting.like
        step = -1 if kind == 'F' else 1
        other = stage
        places = self.placement.places
        while like[places[other]] != places[other]:
            other += step
        return Message(Action(other, kind, i), other + to - stage)

    def _fill(
        self,
        model: Any,
        skeleton: nn.Sequential,
        names: Sequence[str],
        values: Values,
        finish: Callable[[str, nn.Module], None],
    ) -> Mapping[str, nn.Module]:
        """Return copies of some layers with fake tensors."""
        layers = {name: skeleton.get_submodule(name) for name in names}
        memo: dict[int, Any] = {}
        for module in nn.ModuleList(layers.values()).modules():
            for x in (
                *module._parameters.values(),
                *module._buffers.values(),
                *vars(module).values(),
            ):
                if isinstance(x, Tensor) and id(x) not in memo:
                    memo[id(x)] = self.meeting.fake(x)
                elif not isinstance(x, Tensor):
                    _keep_if_not_copied(x, memo)
        copies = {name: deepcopy(layer, memo) for name, layer in layers.items()}
        for name, layer in copies.items():
            finish(name, layer)
        return copies

    def _check_registered(self, facts: Mapping[int, Any]) -> None:
        """Check nothing: one virtual rank stands for all ranks with its stages."""

    def _assemble(self) -> None:
        super()._assemble()
        self.ties.counter = self.counter  # type: ignore[attr-defined]
        self.counter.gathered = lambda: sum(
            local(x).untyped_storage().nbytes() for x in self.replicas.whole_parameters()
        )

    def agree(self, task: str, function: Callable[[], F], default: F) -> dict[int, F]:
        """Call a function, and return the facts of all ranks; replicas have the same ones."""
        facts = function()
        by_place = self.meeting.meet(self.mesh.pipe.rank, facts)
        if not by_place:  # Models are made one by one.
            by_place = [facts] * len(self.mesh.same_stages)
        by_rank = {}
        for ranks, facts in zip(self.mesh.same_stages, by_place):
            by_rank.update(dict.fromkeys(ranks, facts))
        return by_rank


def _keep_if_not_copied(value: Any, memo: dict[int, Any]) -> None:
    """Let copies share an object that cannot be copied, such as a lock."""
    if not isinstance(value, (dict, list, tuple, set, nn.Module)):
        try:
            deepcopy(value, {**memo})
        except Exception:
            memo[id(value)] = value


class VirtualStarts(Starts):
    """The starts of a virtual rank, without values."""

    def _digest_of(self, batches: Sequence[Chunk]) -> int:
        return 0  # Ranks along the tensor axis have the same samples.

    def _make_losses(self, *args: Any) -> Losses:
        losses = super()._make_losses(*args)
        losses.monitor = losses.in_layers = None  # It compares values.
        return losses


class VirtualSteps(Steps):
    """The steps of a virtual rank."""

    _rank: VirtualRank
    _starts_type = VirtualStarts

    def __init__(
        self, rank: VirtualRank, model: DistributedGPipe, at: Any, compare_every: int
    ) -> None:
        super().__init__(rank, model, rank.counter.at, compare_every)

    def _schedule(self, start: Start, *args: Any) -> tuple[Schedule, Sequence[Collection[int]]]:
        schedule, recomputed = super()._schedule(start, *args)
        self._rank.meeting.choose(start.sizes, recomputed)
        return schedule, recomputed

    def _row(self, schedule: Schedule) -> Row:
        self._rank.meeting.schedule = schedule
        return tuple(
            [
                each
                for each in super()._row(schedule)
                if micro_batch_of(each) in self._rank.meeting.micro_batches
            ]
        )

    def _messages(self, headers: dict[Message, Header]) -> Messages:
        return VirtualMessages(self._rank)


def micro_batch_of(item: Any) -> int:
    """Return the micro-batch of an action or a message."""
    found: int = (item if isinstance(item, Action) else item.action).micro_batch
    return found


class VirtualModel(DistributedGPipe):
    """The model of a virtual rank."""

    _rank: VirtualRank
    _steps_type = VirtualSteps
    _watch_type = staticmethod(lambda mesh, timeout: Watch(None, timeout))

    def __init__(self, rank: Callable[..., VirtualRank], *args: Any, **options: Any) -> None:
        self.__dict__['_rank_type'] = rank
        super().__init__(*args, **options)
