"""Where tests run: on the CPU with a worker for each partition, or on accelerators."""

import pytest
import torch

#: The type of device that tests marked `accelerator` run on: a real one, or the simulated one.
ACCELERATOR = str(torch.accelerator.current_accelerator(check_available=True) or 'sim')


def places(letters):
    """Return a device for each letter: `c` is the CPU, `a` the next of the accelerators."""
    count = torch.accelerator.device_count() if 'a' in letters else 0
    return [
        'cpu' if letter == 'c' else f'{ACCELERATOR}:{j % count}'
        for j, letter in enumerate(letters)
    ]


class Devices:
    """Devices of one kind: call it with a number of partitions, to get one for each."""

    def __init__(self, make):
        self._make = make

    def __call__(self, n):
        return self._make(n)

    def distinct(self, n):
        """Return n different ones; skip the test if there are fewer."""
        if self.are_accelerators and torch.accelerator.device_count() < n:
            pytest.skip(f'needs {n} accelerators')
        return self(n)

    @property
    def first(self):
        """The device of the first partition, where inputs have to be."""
        return torch.device(self(1)[0])

    @property
    def are_accelerators(self):
        """Whether work on them is queued, and done later."""
        return self.first.type != 'cpu'

    @property
    def are_apart(self):
        """Whether each has its own memory, so that tensors passed to another one are copied."""
        return self.are_accelerators and torch.accelerator.device_count() > 1


DEVICES = {
    'one worker': Devices(lambda n: ['cpu'] * n),
    'a worker each': Devices(lambda n: [f'cpu:{j}' for j in range(n)]),
    'accelerators': Devices(lambda n: places('a' * n)),
}


devices = pytest.mark.parametrize(
    'devices',
    [
        pytest.param(DEVICES['a worker each'], id='cpu'),
        pytest.param(
            DEVICES['accelerators'],
            id='accelerators',
            marks=pytest.mark.accelerator,
        ),
    ],
)

#: For tests with operations that the simulated accelerator does not have.
cpus = pytest.mark.parametrize('devices', [pytest.param(DEVICES['a worker each'], id='cpu')])
