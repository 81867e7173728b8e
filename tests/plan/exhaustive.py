"""All orders of the actions of small steps, as far as their lower bound is below a time."""

from math import inf

from torchgpipe.plan import simulate
from torchgpipe.schedule import Action, Schedule


class Orders:
    """Orders in which each stage takes micro-batches one after the other.

    Each action starts as soon as it can, and later than the one that was chosen before. Split
    backwards and recomputations are part of the order.

    Args:
        costs: Costs of stages without skips.
        places: The device of each stage.
        m: The number of micro-batches.
        limit: Bytes of each device.
        most: The largest number of orders to look at, complete or not.
    """

    def __init__(self, costs, places, m, limit, most=400_000):
        self.costs, self.places, self.m, self.limit, self.most = costs, places, m, limit, most
        self.own = [
            [j for j, place in enumerate(places) if place == d] for d in range(1 + max(places))
        ]
        stages = costs.stages
        self.seconds = {kind: [x.seconds(kind) for x in stages] for kind in 'FRBIW'}
        whole = [x + y for x, y in zip(self.seconds['I'], self.seconds['W'])]
        #: In a split backward, nothing is later if the halves do not take longer.
        self.kinds = ['I' if x <= y + 1e-12 else 'IB' for x, y in zip(whole, self.seconds['B'])]
        self.short = [*map(min, self.seconds['I'], self.seconds['B'])]
        self.long = [*map(min, whole, self.seconds['B'])]

    def delay(self, one, other):
        """Return the seconds of a message."""
        ends = self.places[one], self.places[other]
        size = self.costs.stages[min(one, other)].output_bytes
        return 0 if ends[0] == ends[1] else self.costs.link(*ends).seconds(size)

    def bound(self, ends, now):
        """Return a lower bound on the end of the step."""
        bounds = []
        for d, own in enumerate(self.own):
            first = own[0]
            todo = sum(
                self.seconds['F'][j] for j in own for i in range(self.m) if (j, 'F', i) not in ends
            )
            back = sum(
                self.short[j] for j in own for i in range(self.m) if (j, 'B', i) not in ends
            )
            rest = sum(
                self.long[j] - self.short[j]
                for j in own
                for i in range(self.m)
                if (j, 'W', i) not in ends
            )
            after = sum(self.short[k] + self.delay(k + 1, k) for k in range(first)) + (
                self.long[0] - self.short[0] if first else 0
            )
            bounds.append(now[d] + todo + back + max(rest, after if todo + back else 0))
        return max(bounds)

    def next(self, ends, now, again, d):
        """Yield start, kind, stage and micro-batch of the next actions of a device."""
        for j in self.own[d]:
            i = sum((j, 'F', k) in ends for k in range(self.m))
            before = ends.get((j - 1, 'F', i)) if j else 0
            if i < self.m and before is not None:
                start = max(now[d], before + self.delay(j - 1, j) if j else 0)
                yield from ((start, kind, j, i) for kind in 'FD')  # Its activations are discarded.
            i = sum((j, 'B', k) in ends for k in range(self.m))
            last = j == len(self.places) - 1
            before = 0 if last else ends.get((j + 1, 'B', i))
            if (j, 'F', i) in ends and before is not None:
                start = max(now[d], 0 if last else before + self.delay(j + 1, j))
                if (j, i) in again:
                    start = max(now[d], start - self.seconds['R'][j])
                yield from ((start, kind, j, i) for kind in self.kinds[j])
            split = [k for k in range(self.m) if (j, 'B', k) in ends and (j, 'W', k) not in ends]
            yield from ((now[d], 'W', j, k) for k in split[:1])

    def faster(self, seconds):
        """Return a schedule that takes less time and fits; ``None`` if there is none.

        Raises:
            TimeoutError: There are too many orders.
        """
        resident = [sum(self.costs.stages[j].resident_bytes for j in own) for own in self.own]
        looked = 0

        def go(rows, ends, now, again, held, last):
            nonlocal looked
            looked += 1
            if looked > self.most:
                raise TimeoutError
            if self.bound(ends, now) >= seconds:
                return None
            choices = sorted(
                (*each, d) for d in range(len(now)) for each in self.next(ends, now, again, d)
            )
            if not choices:
                found = Schedule(rows)
                step = simulate(found, self.costs)
                fits = max(step.peak_bytes) <= self.limit
                return found if fits and step.seconds < seconds else None
            for start, kind, j, i, d in choices:
                if (start, d) < last:
                    continue
                size, more, own = self.costs.stages[j].activation_bytes, {}, []
                more_again, used = again, held[d]
                end = start + self.seconds['F' if kind == 'D' else kind][j]
                if kind in 'FD':
                    more[j, 'F', i], own = end, [Action(j, 'F', i)]
                    used += size * (kind == 'F')
                    more_again = again | {(j, i)} if kind == 'D' else again
                elif kind in 'IB':
                    if (j, i) in again:
                        before = (
                            0
                            if j == len(self.places) - 1
                            else (ends[j + 1, 'B', i] + self.delay(j + 1, j))
                        )
                        end = max(start + self.seconds['R'][j], before) + self.seconds[kind][j]
                        own, used = [Action(j, 'R', i)], used + size
                    more[j, 'B', i], own = end, [*own, Action(j, kind, i)]
                else:
                    more[j, 'W', i], own = end, [Action(j, 'W', i)]
                if kind == 'B':
                    more[j, 'W', i] = end
                if resident[d] + used > self.limit:
                    continue
                found = go(
                    (*rows[:d], (*rows[d], *own), *rows[d + 1 :]),
                    ends | more,
                    [*now[:d], end, *now[d + 1 :]],
                    more_again,
                    [*held[:d], used - size * (kind in 'BW'), *held[d + 1 :]],
                    (start, d),
                )
                if found is not None:
                    return found
            return None

        number = len(self.own)
        return go(((),) * number, {}, [0.0] * number, frozenset(), [0.0] * number, (-inf, 0))
