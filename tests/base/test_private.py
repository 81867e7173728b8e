"""Private names of PyTorch: each is used by itself, so that a release that lacks one is found out.

Each is taken away, too; and which of them stands where is tested: nowhere else in the package.
"""

import ast
import json
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    saved_tensors_hooks,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe
from tests import without
from torchgpipe.base import private

ROOT = Path(torchgpipe.__file__).parent
PAGE = (ROOT.parent / 'docs/private-names.md').read_text()

#: Names in the table of the page, and attributes that may be used anywhere.
TABLE, ATTRIBUTES = (
    re.findall(r'^\| `([^`]+)` \|', part, re.M) for part in PAGE.split('\n## ')[1:]
)


#: Python's own.
PYTHONS = {
    '_asdict',
    '_at_fork_reinit',
    '_current_frames',
    '_exit',
    '_fields',
    '_getframe',
    '_lru_cache_wrapper',
    # A reentrant lock, as `threading.Condition` uses it.
    '_is_owned',
    '_release_save',
    '_acquire_restore',
}


def names_in(path):
    """Return the private names in a file that are not the package's own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('torch.'):
            yield from (
                f'{node.module}.{alias.name}'
                for alias in node.names
                if is_private(f'{node.module}.{alias.name}')
            )
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and is_private(node.value)
            and hasattr(nn.Linear(1, 1), node.value)
        ):
            yield node.value


def is_private(name):
    """Return whether a name has a part that is private."""
    return any(re.match('_(?!_)', part) for part in name.split('.'))


def own_names():
    """Return the package's own definitions: names, attributes and keys."""
    for path in ROOT.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ('self', 'cls')
            ):
                yield node.attr


#: Attributes of models of Transformers: a documented method that they override, and the names and
#: conversions by which the library loads and saves files.
TRANSFORMERS = {
    '_from_model_config',
    '_init_weights',
    '_keys_to_ignore_on_load_missing',
    '_keys_to_ignore_on_load_unexpected',
    '_keys_to_ignore_on_save',
    '_weight_conversions',
}


def test_private_names_stand_in_one_file_but_for_attributes_that_all_of_pytorch_has():
    own = {*own_names()}
    found = {
        name for path in ROOT.rglob('*.py') if path.name != 'private.py' for name in names_in(path)
    }
    assert found - own - PYTHONS - TRANSFORMERS == {*ATTRIBUTES}


def test_the_page_names_all_that_is_looked_up():
    assert sorted(TABLE) == sorted(name.replace(':', '.') for name in without.names())


#: The tested features that need each name. All others work without it.
PIPELINES = {
    'plain',
    'checkpointed',
    'drawing',
    'kept_out_of_recomputation',
    'within_hooks',
    'within_a_default_device',
    'skips',
    'step',
    'step_with_halves',
    'values_of_other_kinds',
    'deferred_batch_norm',
    'recorded',
    'compared',
}
#: A conversion also watches the writes of the sample's forward, and a profile its operations.
WATCHED = PIPELINES | {'converted', 'balanced'}
BACKWARD = {
    'checkpointed',
    'drawing',
    'kept_out_of_recomputation',
    'step',
    'step_with_halves',
    'recorded',
    'compared',
}
VALUES = {'values_of_other_kinds', 'converted', 'compared'}
#: Older releases have no context variables in backward.
IN_CONTEXT = {'given_a_context'} if torch.__version__ >= '2.13' else set()
NEEDED = {
    'torch._C:_autograd._top_saved_tensors_default_hooks': {
        'within_hooks',
        'kept_out_of_recomputation',
        'step_with_halves',
    },
    'torch._C:_current_graph_task_id': BACKWARD,
    'torch._C:_get_dispatch_stack_at': WATCHED,
    'torch._C:_get_function_stack_at': {'within_a_default_device'},
    'torch._C:_get_obj_in_tls': IN_CONTEXT,
    'torch._C:_is_key_in_tls': {'given_a_context'},
    'torch._C:_len_torch_dispatch_stack': PIPELINES | {'transformed'},
    'torch._C:_len_torch_function_stack': PIPELINES,
    'torch._C:_pop_torch_dispatch_stack': WATCHED,
    'torch._C:_pop_torch_function_stack': {'within_a_default_device'},
    'torch._C:_push_on_torch_dispatch_stack': WATCHED,
    'torch._C:_push_on_torch_function_stack': {'within_a_default_device'},
    'torch._C:_stash_obj_in_tls': IN_CONTEXT,
    'torch._ops:OpOverload._schema': WATCHED,
    'torch.amp:GradScaler._unscale_grads_': {'scaled'},
    'torch.autograd:Variable._execution_engine.queue_callback': BACKWARD
    - {'step', 'step_with_halves'},
    'torch.nn.parallel:DistributedDataParallel._get_active_ddp_module': {'sharded'},
    'torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model': {
        'sharded',
        'told_to_ddp',
    },
    'torch.nn:Module._compiled_call_impl': {'kept_out_of_recomputation', 'step_with_halves'},
    'torch.nn:Module._ddp_params_and_buffers_to_ignore': {'told_to_ddp'},
    'torch.utils._python_dispatch:TorchDispatchMode': WATCHED,
    'torch.utils._pytree:tree_flatten': VALUES,
    'torch.utils._pytree:tree_flatten_with_path': VALUES - {'values_of_other_kinds'},
    'torch.utils._pytree:tree_leaves': PIPELINES | {'transformed', 'balanced'},
    'torch.utils._pytree:tree_map_only': {'kept_out_of_recomputation'},
    'torch.utils._pytree:tree_unflatten': VALUES,
}


@pytest.mark.slow
def test_each_missing_private_name_leaves_the_import_and_is_named_where_needed():
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'tests.without'],
        check=True,
        stdout=subprocess.PIPE,
        cwd=ROOT.parent,
    )
    found = json.loads(result.stdout)
    assert [*found] == ['', *without.names()]
    for name, raised in found.items():
        assert {feature for feature, says_so in raised.items() if says_so is True} == {*raised}, (
            name,
            raised,
        )
        assert {*raised} == NEEDED.get(name, set()), name


@pytest.mark.parametrize(
    'line, is_missing',
    [
        ('from torch import no_such_name', True),
        ('import torch.no_such_module', True),
        ('import no_such_package.torch', False),
        ('raise ImportError("broken")', False),
    ],
)
def test_only_a_name_that_pytorch_lacks_is_missing(tmp_path, monkeypatch, line, is_missing):
    """In v0.22, a module of PyTorch that needs NumPy was taken for a missing name."""
    (tmp_path / 'module_of_pytorch.py').write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop('module_of_pytorch', None)
    if is_missing:
        assert private.find('module_of_pytorch:name', otherwise=0) == 0
    else:
        with pytest.raises(ImportError, match='no_such_package|broken'):
            private.find('module_of_pytorch:name', otherwise=0)


def test_saved_tensor_hooks():
    assert private.innermost_hooks() is None
    with saved_tensors_hooks(len, str):
        assert private.innermost_hooks() == (len, str)
        with saved_tensors_hooks(abs, int):
            assert private.innermost_hooks() == (abs, int)
        assert private.innermost_hooks() == (len, str)


class Look(torch.autograd.Function):
    """Record the state of the pass in backward."""

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


def test_backward_from_edges():
    for function in [private.backward_from, torch.autograd.backward]:
        x = torch.ones(2, requires_grad=True)
        edges = get_gradient_edge(x * 2), get_gradient_edge(x.sum())
        function(edges, (torch.ones(2), torch.tensor(3.0)))
        assert x.grad.tolist() == [5, 5], function


def test_a_tensor_without_memory():
    class Shape(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    x = private.on_cpu_without_memory(Shape, torch.Size([10**9, 10**5]), torch.half)
    assert isinstance(x, Shape) and x.shape == (10**9, 10**5) and x.dtype == torch.half
    assert x.device == torch.device('cpu') and not x.is_meta and x.is_contiguous()


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


def test_modes():
    for kind, stack in [(Function, private.FUNCTION_MODES), (Dispatch, private.DISPATCH_MODES)]:
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
        seen.append((private.is_transformed(), torch.jit.is_tracing(), private.proxy_mode()))
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


class Doubled(private.DispatchMode):
    """A mode that computes more than it is called for, without telling the compiler."""

    @classmethod
    def is_infra_mode(cls):
        """Let layers be compiled in it."""
        return True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {})) * 2


@pytest.mark.usefixtures('compiler')
def test_a_mode_is_not_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = torch.ones(3)
    private.DISPATCH_MODES.push(Doubled())
    try:
        output = torch.compile(between_operations, backend=backend)(x)
    finally:
        private.DISPATCH_MODES.pop()
    assert output.equal(x.exp() * 2) and not graphs


@partial(private.uncompiled, recursive=False)
def between_operations(x):
    """Call an operation, and with it the mode, outside any graph."""
    return x.exp()


@pytest.mark.usefixtures('compiler')
def test_functions_that_are_not_compiled():
    for function, number in [
        (sine, 1),
        (apart, 0),
        (between, 1),
        (lambda x: sine(x + 1) * 2, 1),
        (lambda x: apart(x + 1) * 2, 2),
    ]:
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
        'a': [3, 4],
        'b': 5,
    }
    paths, _ = private.tree_flatten_with_path(value)
    assert [(path[0].key, leaf) for path, leaf in paths] == [('a', 1), ('a', 2), ('b', None)]
    assert paths[0][0][1].idx == 0


def test_the_default_device():
    with torch.device('meta'):
        assert isinstance(private.FUNCTION_MODES.read()[0], private.DeviceContext)


def test_modules():
    assert issubclass(nn.BatchNorm2d, private.BatchNorm)
    assert private.is_full_backward_hook in vars(nn.Linear(1, 1))


def test_modules_that_have_only_a_private_reset():
    for module in (nn.MultiheadAttention(4, 2), nn.Transformer(4, 2, 1, 1, 4, batch_first=True)):
        public, own = (hasattr(module, name) for name in private.RESETS)
        assert own and not public


def test_findings_of_a_scaler_decide_the_step():
    for fused in [False, True]:

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
        assert scaler.get_scale() == 4.0 and layer.weight.item() == before, fused


@pytest.mark.skipif(not torch.distributed.is_available(), reason='without torch.distributed')
def test_ddp_leaves_the_attributes_of_the_model():
    layer = nn.Linear(1, 1)
    private.ignore_in_ddp(layer, ['bias'])
    private.ignore_in_ddp(layer, ['others'])
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        ddp, seen = nn.parallel.DistributedDataParallel(layer), []
        assert ddp.parameters_to_ignore == {'bias', 'others'} and private.active_ddp() is None
        layer.register_forward_hook(lambda *args: seen.append(private.active_ddp()))
        ddp(torch.ones(1))
        assert seen == [ddp]
    finally:
        torch.distributed.destroy_process_group()


def test_an_alias_in_a_mode_shows_later_changes():
    """A tensor that is detached in a mode has its own version."""
    aliases = []

    class Mode(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            aliases.append(private.alias_of(output))
            return output

    with Mode():
        y = torch.ones(2, requires_grad=True) * 2
    before = private.versions(aliases)
    y.detach().add_(1)
    assert private.versions(aliases[-1:]) != before[-1:]
    assert aliases[-1].grad_fn is None
