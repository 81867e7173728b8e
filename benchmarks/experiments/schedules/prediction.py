"""The time of a step of the cells, by a profile of their layers and the simulator."""

from typing import NamedTuple

from torch import Tensor, nn

from torchgpipe.balance import profile
from torchgpipe.plan import Costs, measure_overhead, simulate
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import PLAIN_CALL, plain_call


class Prediction(NamedTuple):
    """The time of a step in seconds, and the part of it in which devices wait."""

    seconds: float
    bubble: float


def predict(cells: nn.Sequential, sample: Tensor, n: int, m: int) -> dict[str, Prediction]:
    """Profile the layers now, one after the other in this thread, and simulate the contenders.

    Args:
        cells: The cells of the contenders.
        sample: A micro-batch.
        n: The number of devices.
        m: The number of micro-batches.
    """
    cells.zero_grad()
    layers = nn.Sequential()
    for cell in cells.children():
        layers.extend(cell.children())
    measured = profile(layers, sample, device='cpu', timeout=0)
    sequential = m * sum(x.forward_seconds + x.backward_seconds for x in measured.layers)
    predictions = {'in sequence': Prediction(sequential, 0.0)}
    overhead = measure_overhead([f'cpu:{j}' for j in range(n)])
    for name in (PLAIN_CALL, *NAMES):
        if name == PLAIN_CALL:
            schedule, pairs = plain_call(n, m, one_thread=True)
        else:
            schedule, pairs = make(name, n, m), []
        stages = sum(map(len, schedule.stages))
        balance = [len(layers) // stages] * stages
        costs = Costs.of(measured, balance, 1, 'never', overhead=overhead)
        simulation = simulate(schedule, costs, pairs)
        predictions[name] = Prediction(simulation.seconds, simulation.bubble)
    return predictions
