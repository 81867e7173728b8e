"""Try features without a private name of PyTorch: ``python -m tests.without`` tries each in turn.

Each is tried in a process of its own, in which ``torchgpipe.base.private`` asks for another name,
that PyTorch does not have. PyTorch itself keeps the name: it is one that it may have renamed.
"""

import copy
import json
import multiprocessing
import os
import re
import sys
import warnings
from contextvars import ContextVar
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import nn

VARIABLE = ContextVar('VARIABLE')
SOURCES = [Path(__file__).parent.parent / 'torchgpipe/base/private.py']

#: Attributes that are looked up on their own, by name, and their text in the source.
ATTRIBUTES = {
    'torch._ops:OpOverload._schema': "'_schema'",
    'torch.nn:Module._compiled_call_impl': "'_compiled_call_impl'",
    'torch.nn:Module._ddp_params_and_buffers_to_ignore': "'_ddp_params_and_buffers_to_ignore'",
    'torch._functorch._aot_autograd.runtime_wrappers': (
        "'torch._functorch._aot_autograd.runtime_wrappers'"
    ),
}


def names():
    """Return all that ``torchgpipe.base.private`` asks for by name."""
    found = re.findall(r"'(torch[\w.]*:[\w.]+)'", ''.join(path.read_text() for path in SOURCES))
    return sorted({*found, *ATTRIBUTES})


def import_without(name):
    """Import the package, with another name in the place of one."""
    quoted = ATTRIBUTES.get(name, f"'{name}'")
    assert any(quoted in path.read_text() for path in SOURCES)

    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        if fullname.startswith('torchgpipe.base.private'):
            source = source.replace(quoted, f"{quoted[:-1]}_gone'")
        return compile(source, self.path, 'exec')

    with mock.patch.object(SourceFileLoader, 'get_code', get_code):
        import torchgpipe
    return torchgpipe


def run(gpipe, model, x, call=None):
    """Go forward and backward, and compare with the unwrapped model."""
    for each in (gpipe, model):
        torch.manual_seed(0)
        each.zero_grad()
        output = (call if call and each is gpipe else each)(x)
        (output if isinstance(output, torch.Tensor) else output['y']).square().mean().backward()
    for a, b in zip(gpipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Features:
    """The tested features: each method compares with the unwrapped model, or raises."""

    def __init__(self, package):
        self.package = package
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.x = torch.rand(6, 4, dtype=torch.double)
        VARIABLE.set(1)  # A pipeline looks for graphs in them.

    def gpipe(self, model=None, balance=(2, 1), **options):
        """Wrap a model, or this one, on two workers."""
        return self.package.GPipe(
            copy.deepcopy(self.model if model is None else model),
            [*balance],
            devices=['cpu:0', 'cpu:1'],
            chunks=3,
            **options,
        )

    def plain(self):
        run(self.gpipe(checkpoint='never'), self.model, self.x)

    def checkpointed(self):
        run(self.gpipe(checkpoint='always'), self.model, self.x)

    def drawing(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)).double()
        gpipe = self.package.GPipe(
            copy.deepcopy(model), [2, 1], devices=['cpu', 'cpu'], chunks=1, checkpoint='always'
        )
        run(gpipe, model, self.x)

    def kept_out_of_recomputation(self):
        model = copy.deepcopy(self.model)
        self.package.no_recompute(model[1])
        run(self.gpipe(model, checkpoint='always'), self.model, self.x)

    def within_hooks(self):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            run(self.gpipe(checkpoint='never'), self.model, self.x)

    def within_a_default_device(self):
        with torch.device('cpu'):
            run(self.gpipe(checkpoint='never'), self.model, self.x)

    def skips(self):
        from torchgpipe.skip import pop, skippable, stash

        @skippable(stash=['skip'])
        class Stash(nn.Module):
            def forward(self, x):
                yield stash('skip', x)
                return x * 2

        @skippable(pop=['skip'])
        class Pop(nn.Module):
            def forward(self, x):
                return x + (yield pop('skip'))

        ours, model = (
            nn.Sequential(nn.Linear(4, 2), *between).double()
            for between in ([Stash(), nn.Tanh(), Pop()], [Residual()])
        )
        model.load_state_dict(ours.state_dict())
        run(self.gpipe(ours, (2, 2), checkpoint='never'), model, self.x)

    def step(self, schedule='1f1b'):
        gpipe = self.gpipe()
        loss = gpipe.step(self.x, self.x[:, :2], nn.functional.mse_loss, schedule=schedule)
        expected = nn.functional.mse_loss(self.model(self.x), self.x[:, :2])
        self.model.zero_grad()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for a, b in zip(gpipe.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def step_with_halves(self):
        self.step('zb-h1')

    def values_of_other_kinds(self):
        model = nn.Sequential(ToDict(), FromDict()).double()
        run(self.gpipe(model, (1, 1), checkpoint='never'), model, self.x)

    def deferred_batch_norm(self):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        gpipe = self.gpipe(model, (1, 1), checkpoint='never', deferred_batch_norm=True)
        gpipe(self.x)
        model(self.x)
        torch.testing.assert_close(gpipe[0].running_mean, model[0].running_mean)

    def built_on_the_meta_device(self):
        with torch.device('meta'):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
        gpipe = self.package.GPipe(model, [1, 1], devices=['cpu', 'cpu'])
        assert gpipe[0].weight.std() > 0

    def converted(self):
        from torchgpipe.sequential import to_sequential

        layers = to_sequential(Net().double(), self.x)
        model = Net().double()
        layers.load_state_dict(model.state_dict())
        torch.testing.assert_close(layers(self.x), model(self.x))

    def balanced(self):
        from torchgpipe.balance import balance_by_size

        assert sum(balance_by_size(2, self.model, self.x, device='cpu')) == 3

    def recorded(self):
        from torchgpipe.timeline import record

        gpipe = self.gpipe(checkpoint='never')
        with record(gpipe):
            gpipe(self.x).sum().backward()

    def compared(self):
        from torchgpipe.testing import check_parity

        check_parity(
            copy.deepcopy(self.model), self.x, balance=[2, 1], chunks=2, devices=['cpu:0', 'cpu:1']
        )

    def compiled(self):
        gpipe = self.package.GPipe(
            copy.deepcopy(self.model),
            [2, 1],
            devices=['cpu', 'cpu'],
            chunks=2,
            checkpoint='always',
        )
        for partition in gpipe.partitions:
            partition.compile(backend='aot_eager')
        run(gpipe, self.model, self.x)

    def sharded(self):
        import torchgpipe.shard as ts

        torch.distributed.init_process_group(
            'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        ts.distributed.init_process_group()
        layer = ts.nn.ParallelLinear(4, 2)
        assert layer(torch.rand(3, 4)).shape == (3, 2)
        ts.register_ddp_parameters_to_ignore(layer)

    def scaled(self):
        from torchgpipe.base.private import Scaler

        Scaler('cpu')

    def told_to_ddp(self):
        from torchgpipe.base.private import ignore_in_ddp

        ignore_in_ddp(self.model, ['0.weight'])

    def transformed(self):
        with pytest.raises(RuntimeError, match='func'):
            torch.func.vmap(self.gpipe(checkpoint='never'))(torch.rand(2, 3, 4).double())

    def given_a_context(self):
        from torchgpipe.base.private import own_context

        output = self.model(self.x).sum()
        output.grad_fn.register_prehook(own_context)
        output.backward()


class Residual(nn.Module):
    """Add the tanh of the doubled input."""

    def forward(self, x):
        return (x * 2).tanh() + x


class ToDict(nn.Linear):
    """Return a dict."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return {'x': x, 'y': super().forward(x)}


class FromDict(nn.Linear):
    """Take a dict, and return another one."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, value):
        return {'y': super().forward(value['x'] + value['y'])}


class Net(nn.Module):
    """A model that is not sequential."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(x + self.a(x).relu())


FEATURES = [
    name for name in vars(Features) if name not in ('__init__', 'gpipe') and name[0] != '_'
]


def outcomes(name):
    """Return the features that raise, and whether each says which name is missing."""
    package = import_without(name) if name else __import__('torchgpipe')
    said = {}
    missing = name.replace(':', '.')
    for feature in FEATURES:
        if feature == 'compiled' and not re.search('dynamo|_functorch|compiled', name):
            continue  # It takes longer than all others.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                getattr(Features(package), feature)()
        except Exception as error:
            text = repr(error) + ''.join(getattr(error, '__notes__', []))
            said[feature] = True if missing and missing in text else text
    return said


def _send(name, pipe):
    pipe.send(outcomes(name))
    pipe.close()
    os._exit(0)


def main():
    """Print the outcomes of all names, and of none, as JSON."""
    context, found = multiprocessing.get_context('fork'), {}
    for name in sys.argv[1:] or ['', *names()]:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(name, send))
        process.start()
        send.close()
        try:
            found[name] = receive.recv()
        except EOFError:
            found[name] = 'the process ended'
        process.join()
    print(json.dumps(found, indent=1))


if __name__ == '__main__':
    main()
