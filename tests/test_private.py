"""Private names of PyTorch: each is used by itself, so that a release that lacks one is found out.

Which of them stands where is tested too: nowhere else in the package.
"""
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe
from torchgpipe import private

PRIVATE = re.compile(r'torch\._\w+|\bnn\.\w+\._\w+\.|_cdata|_execution_engine|_is_full_backward'
                     r'|import Backward\w+'
                     r'|from torch(?!gpipe)[\w.]*( import |\.)_\w+')


def test_no_other_file_uses_private_names():
    root = Path(torchgpipe.__file__).parent
    for path in root.rglob('*.py'):
        found = PRIVATE.findall(path.read_text())
        assert bool(found) == (path.name == 'private.py'), (path, found)


def test_saved_tensor_hooks():
    assert private.innermost_hooks() is None
    with saved_tensors_hooks(len, str):
        assert private.innermost_hooks() == (len, str)
        with saved_tensors_hooks(abs, int):
            private.pop_hooks()
            assert private.innermost_hooks() == (len, str)
            torch.autograd.graph.saved_tensors_hooks(abs, int).__enter__()
    assert private.innermost_hooks() is None


class Look(torch.autograd.Function):
    """Note in backward what is known of the pass."""

    seen = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Look.seen += [private.backward_pass(), private.retains_graph(), private.current_node()]
        private.at_end_of_backward(lambda: Look.seen.append('end'))
        return grad * 2


def test_a_backward_pass():
    Look.seen = []
    assert private.backward_pass() == -1
    y = Look.apply(torch.ones(1, requires_grad=True))
    node = y.grad_fn
    assert isinstance(node, private.PythonNode)
    assert not isinstance((y * 2).grad_fn, private.PythonNode)
    y.backward(retain_graph=True)
    y.backward()
    first, retained, running, end, second, retained_again, running_again, _ = Look.seen
    assert -1 not in (first, second) and first != second
    assert (retained, retained_again) == (True, False)
    assert running is node and running_again is node and end == 'end'


def test_memory():
    x = torch.zeros(3)
    assert private.storage_id(x) == private.storage_id(x[1:]) != private.storage_id(x.clone())
    empty = torch.empty(0, device='meta'), torch.empty(0, device='meta')
    assert private.storage_id(empty[0]) != private.storage_id(empty[1])
    assert private.data_address(x[1:]) == private.data_address(x) == x.data_ptr()


def test_a_tensor_without_memory():
    class Shape(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    x = private.on_cpu_without_memory(Shape, torch.Size([10 ** 9, 10 ** 5]), torch.half)
    assert isinstance(x, Shape) and x.shape == (10 ** 9, 10 ** 5) and x.dtype == torch.half
    assert x.device == torch.device('cpu') and not x.is_meta and x.is_contiguous()


def test_a_copy_on_write():
    x = torch.zeros(3)
    version = x._version
    copy = private.lazy_clone(x)
    assert private.data_address(copy) == private.data_address(x)
    x.data.add_(1)  # no new version
    assert private.data_address(copy) != private.data_address(x)
    assert x._version == version and copy.sum() == 0


class Function(TorchFunctionMode):
    """Count calls."""

    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        Function.calls += 1
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    """Count operations."""

    calls = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        Dispatch.calls += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize('kind, stack', [(Function, private.FUNCTION_MODES),
                                         (Dispatch, private.DISPATCH_MODES)])
def test_modes(kind, stack):
    kind.calls = 0
    mode = kind()
    assert stack.len() == 0 and stack.read() == ()
    with mode:
        assert stack.read() == (mode,)
        torch.ones(1).neg()
        seen = kind.calls
        with private.unseen():
            torch.ones(1).neg()
            assert stack.len() == 0
        assert kind.calls == seen > 0
        stack.write(())
        stack.push(mode)
        assert stack.pop() is mode
        stack.write((mode,))
    assert stack.len() == 0


def test_transforms_and_traces():
    seen = []

    def look(x):
        seen.append((private.is_transformed(), private.is_tracing(), private.proxy_mode()))
        return x * 2

    look(torch.ones(1))
    torch.func.vmap(look)(torch.ones(1))
    make_fx(look)(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # Some releases call it deprecated.
        torch.jit.trace(look, torch.ones(1), check_trace=False)
    plain, transformed, proxy, traced = seen
    assert plain == (False, False, None)
    assert transformed[0] and traced[1] and proxy[2] is not None


def test_mutation_is_allowed_in_one_thread():
    with allow_mutation_on_saved_tensors(), ThreadPoolExecutor(1) as pool:
        assert private.allows_mutation()
        assert not pool.submit(private.allows_mutation).result()
    assert not private.allows_mutation()


def sine(x):
    """Be called by others."""
    return x.sin()


@private.uncompiled
def apart(x):
    """Call it."""
    return sine(x)


@partial(private.uncompiled, recursive=False)
def between(x):
    """Call it."""
    return sine(x)


@pytest.mark.usefixtures('compiler')
@pytest.mark.parametrize('function, number', [
    (sine, 1), (apart, 0), (between, 1), (lambda x: sine(x + 1) * 2, 1),
    (lambda x: apart(x + 1) * 2, 2)])
def test_what_is_not_compiled(function, number):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = torch.ones(3)
    assert torch.compile(function, backend=backend)(x).equal(function(x))
    assert len(graphs) == number


@pytest.mark.usefixtures('compiler')
def test_which_compiled_code_saves_a_tensor():
    seen = []

    def pack(x):
        frame = sys._getframe(1)
        seen.append(private.compiled_code(frame) if frame.f_code is private.APPLY else None)

    with saved_tensors_hooks(pack, int):
        x = torch.ones(3, requires_grad=True)
        compiled = torch.compile(sine, backend='aot_eager')
        sine(x), Look.apply(x), compiled(x), compiled(x)
        torch._dynamo.reset()
        compiled(x)
    plain, first, again, other = seen
    assert plain is None and first is again is not None and other not in (None, first)


def test_trees():
    value = {'a': [1, (2,)], 'b': None}
    assert private.tree_leaves(value) == [1, 2, None]
    assert private.tree_map_only(int, str, value) == {'a': ['1', ('2',)], 'b': None}
    leaves, spec = private.tree_flatten(value, is_leaf=lambda x: isinstance(x, tuple))
    assert leaves == [1, (2,), None] and private.tree_unflatten([3, 4, 5], spec) == {
        'a': [3, 4], 'b': 5}
    paths, _ = private.tree_flatten_with_path(value)
    assert [(path[0].key, leaf) for path, leaf in paths] == [('a', 1), ('a', 2), ('b', None)]
    assert paths[0][0][1].idx == 0


def test_the_default_device():
    with torch.device('meta'):
        assert isinstance(private.FUNCTION_MODES.read()[0], private.DeviceContext)


def test_modules():
    assert issubclass(nn.BatchNorm2d, private.BatchNorm)
    assert private.is_full_backward_hook in vars(nn.Linear(1, 1))


def test_attributes_of_torch_script():
    class Counter(nn.Module):
        n: int

        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x: torch.Tensor):
            self.n += 1
            return x

    assert private.script_attributes(torch.jit.script(Counter())) == ['n']


def test_parse_to():
    assert private.parse_to('cuda:1', torch.float) == torch.device('cuda:1')
    assert private.parse_to(torch.float) is None


def test_modules_that_have_only_a_private_reset():
    for module in (nn.MultiheadAttention(4, 2), nn.Transformer(4, 2, 1, 1, 4, batch_first=True)):
        public, own = (hasattr(module, name) for name in private.RESETS)
        assert own and not public


def test_without_torch_function():
    class Stubborn(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    x = torch.ones(2).as_subclass(Stubborn)
    with private.without_torch_function():
        assert type(x + 1) is torch.Tensor
    with pytest.raises(AssertionError):
        x + 1


def test_the_class_of_nodes():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    y = Double.apply(torch.ones(1, requires_grad=True))
    assert private.backward_class(Double) is type(y.grad_fn)


@pytest.mark.parametrize('fused', [False, True])
def test_what_a_scaler_finds(fused):
    class Pessimist(private.Scaler):
        def found(self, where, scale):
            assert all(not found for found in where.values())
            return {scale.device: torch.ones_like(scale)}

    layer = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    scaler, before = Pessimist('cpu', init_scale=8.0), layer.weight.item()
    scaler.scale(layer(torch.ones(1))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and layer.weight.item() == before


@pytest.mark.skipif(not torch.distributed.is_available(), reason='without torch.distributed')
def test_what_ddp_leaves_alone():
    layer = nn.Linear(1, 1)
    assert private.ignored_in_ddp(layer) == []
    private.ignore_in_ddp(layer, ['bias'])
    assert private.ignored_in_ddp(layer) == ['bias']
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp, seen = nn.parallel.DistributedDataParallel(layer), []
        assert ddp.parameters_to_ignore == {'bias'} and private.active_ddp() is None
        layer.register_forward_hook(lambda *args: seen.append(private.active_ddp()))
        ddp(torch.ones(1))
        assert seen == [ddp]
    finally:
        torch.distributed.destroy_process_group()
