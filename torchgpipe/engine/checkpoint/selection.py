"""Selection: results of operations that a first pass keeps and its recomputation reuses.

A dispatch mode sees each operation of a cell, below autograd. So a recomputation builds the graph
of the first pass, but the kept operations do not run again::

    first pass       x ──▶ mm ──▶ y ──▶ gelu ──▶ z ──▶ mm ──▶ …      nodes are hollow
                                  └──▶ kept: an alias of y
    recomputation    x ──▶ mm     └──▶ y' ──▶ gelu ──▶ z ──▶ mm      nodes save x, y', z

The policy decides in the first pass only; a recomputation repeats the decisions by the number of
the call of each operation.

[Note: Changes of kept results]
A kept result is an alias of the memory in which later operations may write. Before an operation in
this cell writes there, the kept result becomes a copy (1). A write that the mode does not see, by
compiled code or after the cell, changes the version, and then the operation runs again (2)::

    first pass       conv ──▶ y ──▶ relu_(y)      before relu_: kept = copy of y           (1)
    after the cell   y.add_(1)                    version of kept ≠ version when it was kept (2)

[Note: Inputs of kept operations]
Without a policy, another value in a recomputation, such as by a draw that PyTorch does not see,
changes the output, which is compared. A kept result hides it, and the gradients of the operation
would be wrong. So some elements of its inputs are compared instead.

[Note: Lifetime of kept results]
    operation ──▶ KeptResult, owned by Selection ──▶ taken by the last run, and freed
It has no graph (rule 6). An offload moves its tensors to the host at once, and back when they are
needed. The output of the model is freed after the first pass, unless the policy demands it.

In a module of :func:`~torchgpipe.engine.policy.no_recompute`, the nodes also save their
tensors themselves, in both passes. So the module may ask for gradients in its forward.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.errors import other_path
from torchgpipe.base.private import (
    Hooks,
    InternalMode,
    alias_of,
    in_compiled_code,
    innermost_hooks,
    is_compiled_module,
    name_of_call,
    tree_leaves,
    tree_map_only,
    unseen,
    untraced,
    versions,
)
from torchgpipe.base.structure import local_storage_id, size_of
from torchgpipe.engine.checkpoint.offload import Offload
from torchgpipe.engine.checkpoint.random import Draws, States, operation_of
from torchgpipe.engine.checkpoint.samples import (
    NUMBER,
    PendingComparison,
    Sample,
    compare,
    few_elements_of,
    samples_of,
)
from torchgpipe.engine.checkpoint.swaps import entry, substituted
from torchgpipe.engine.policy import (
    OperationContext,
    PartitionPolicy,
    Policy,
    decision_of,
    keep_everything,
)
from torchgpipe.engine.streams import AbstractStream, CPUStream

T = TypeVar('T')

#: From this number of bytes on, the kept tensors of an operation wait in host memory, if the
#: inputs of checkpointed cells do.
LARGE = 1 << 20

INPUT = 'the input of an operation whose result is kept has other values'


class Scopes(NamedTuple):
    """The policy of a partition's cells, and the modules within which another one applies."""

    policy: Policy | None
    modules: dict[nn.Module, Policy | None]

    @staticmethod
    def of(
        layers: nn.Module,
        marked: Sequence[nn.Module],
        policy: PartitionPolicy,
    ) -> 'Scopes':
        """Return the policies of a partition with these marked modules.

        Raises:
            RuntimeError: A policy applies to a compiled module, whose operations no mode sees.
        """
        scopes: dict[nn.Module, Policy | None] = {}
        for name, policy_of_module in policy.modules.items():
            scopes[layers.get_submodule(name)] = policy_of_module
        for module in marked:
            scopes[module] = keep_everything
        # The layers of a partition may also be compiled together.
        if policy.policy is not None and 'forward' in layers.__dict__:
            raise _compiled()
        everywhere = {layers: policy.policy, **scopes}
        for module, policy_of_module in everywhere.items():
            if policy_of_module is not None and any(map(is_compiled_module, module.modules())):
                raise _compiled()
        return Scopes(policy.policy, scopes)


def _compiled() -> RuntimeError:
    return RuntimeError(
        'a policy for the results that checkpointing keeps applies to compiled code, whose '
        'operations are not visible. Leave the compiled layers out of keep, as in '
        "keep={'0.attention': 'products'}, or do not compile them"
    )


#: In place of the tensors of a result.
_NOTHING = torch.empty(0)


class KeptResult:
    """The result of one call of an operation.

    Args:
        start: The states of generators before the call.
        end: The states after it.
    """

    def __init__(self, output: Any, start: States, end: States) -> None:
        self.start = start
        self.end = end
        # Autograd will give the tensors themselves a graph.
        self._structure = tree_map_only(Tensor, lambda x: _NOTHING, output)
        leaves = tree_leaves(output)
        self.tensors = [alias_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self._versions = versions(self.tensors)
        #: Tensors with the versions of the result.
        self._watched = self.tensors
        self._offload: Offload | None = None
        self._is_changed_later = False
        #: Whether it is not kept if it is the output of the model.
        self.is_optional = False

    @property
    def is_valid(self) -> bool:
        """Whether its tensors are the result."""
        return versions(self._watched) == self._versions

    def store(self, offload: Offload, stream: AbstractStream) -> None:
        """Move its tensors to the host."""
        self.tensors = [*offload.store(tuple(self.tensors), stream)]
        self._watched = offload.aliases
        self._offload = offload

    def separate(self, stream: AbstractStream) -> None:
        """Copy its tensors, because an operation is about to write to their memory."""
        if not self.is_valid:
            return
        if self._offload is None:
            self.tensors = [x.clone() for x in self.tensors]
        else:
            self._offload.wait(stream)
        self._watched = []
        self._versions = []
        self._is_changed_later = True

    def drop(self) -> None:
        """Release its tensors. From now on, the operation runs again."""
        self.tensors = []
        self._watched = []
        self._versions = [-1]

    def value(self, stream: AbstractStream) -> Any:
        """Return the result, for a recomputation, in which operations may change it as before."""
        tensors: Sequence[Tensor] = self.tensors
        if self._offload is not None:
            tensors = self._offload.fetch(tuple(tensors), stream)
        elif self._is_changed_later:
            tensors = [x.clone() for x in tensors]
        remaining = iter(tensors)
        return tree_map_only(Tensor, lambda _: next(remaining).detach(), self._structure)


class _SelectionMode(InternalMode):
    """Passes each operation to a function."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return self._handle(func, args, kwargs or {})


class Selection:
    """The kept results of one checkpointed cell.

    Args:
        stream: The compute stream.
        host_stream: Copies results to the host; no result is copied if it is the CPU's.
        offloads_large: Whether all large results are copied, and not only by the policy.
        is_last: Whether the output goes into the loss. Then it is not kept.
    """

    def __init__(
        self,
        scopes: Scopes,
        draws: Draws,
        stream: AbstractStream,
        host_stream: AbstractStream,
        offloads_large: bool,
        is_last: bool,
    ) -> None:
        self._is_last = is_last
        self._scopes = scopes
        self._draws = draws
        self._host_stream = host_stream
        self._offloads_large = offloads_large
        self._stream = stream
        #: The policy for the operations that run now.
        self._policy = scopes.policy
        #: By operation, the result of each call that a policy decided about; ``None`` if it was
        #: not kept.
        self._calls: defaultdict[Any, list[KeptResult | None]] = defaultdict(list)
        #: The kept results by their memories, until a write to the memory.
        self._by_memory: defaultdict[int, list[KeptResult]] = defaultdict(list)
        #: Comparisons of the last recomputation that wait for an accelerator.
        self.pending: list[PendingComparison] = []
        self._releases = False
        #: The number of calls of each operation in a recomputation so far.
        self._numbers: defaultdict[Any, int] = defaultdict(int)
        #: Elements of the inputs of kept operations in the pass that runs now, by their type.
        self._inputs: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        #: The same of the first pass, when it has ended.
        self._samples: list[Sample] = []

    def record(
        self,
        hooks: saved_tensors_hooks,
        function: Callable[[], list[Tensor]],
    ) -> list[Tensor]:
        """Run the cell for the first time, with these hooks."""
        mode = _SelectionMode(self._first_call)
        output = self._run(hooks, partial(mode.run, function))
        if self._is_last:
            # The loss frees the output, such as scores for each token of a vocabulary.
            for x in output:
                for result in self._by_memory.pop(local_storage_id(x), ()):
                    if result.is_optional:
                        result.drop()
        self._samples = samples_of(self._take_inputs())
        return output

    def replay(
        self,
        hooks: saved_tensors_hooks,
        function: Callable[[], T],
        releases: bool,
    ) -> T:
        """Run the cell again, with the kept results in place of their operations.

        Args:
            releases: Whether to free each result when it is taken, because this is the last run.

        Raises:
            RuntimeError: It has called other operations, or with other inputs.
        """
        self._releases = releases
        self._numbers.clear()
        self._inputs.clear()
        mode = _SelectionMode(self._next_call)
        output = self._run(hooks, partial(mode.run, function))
        for operation, results in self._calls.items():
            number = self._numbers[operation]
            if number != len(results) and any(results):
                raise other_path(
                    f'it called {operation}, whose results are kept, {number} times, the first '
                    f'pass {len(results)} times'
                )
        self.pending = compare(self._take_inputs(), self._samples, INPUT)
        return output

    def _take_inputs(self) -> list[Tensor]:
        """Return the elements of inputs, in tensors that are compared as a whole."""
        joined: list[Tensor] = []
        with unseen():
            for elements in self._inputs.values():
                joined += torch.cat(elements).split(NUMBER)
        self._inputs.clear()
        return joined

    def hooks_aside(self, hooks: Hooks) -> Hooks:
        """Return hooks of the user whose operations are not those of the cell."""

        def call(hook: Callable[..., Any], *args: Any) -> Any:
            policy = self._policy
            self._policy = None
            try:
                return hook(*args)
            finally:
                self._policy = policy

        pack, unpack = hooks
        return partial(call, pack), partial(call, unpack)

    # --- operations

    def _first_call(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation in a first pass, and keep its result if the policy says so."""
        properties = operation_of(operation)
        if self._by_memory:
            with unseen():
                for x in properties.written_by(args, kwargs):
                    for kept in self._by_memory.pop(local_storage_id(x), ()):
                        kept.separate(self._stream)  # (1)
        policy = self._policy
        if policy is None:
            return operation(*args, **kwargs)

        start: States = {}
        if properties.may_draw:
            start = self._draws.position()
        output = operation(*args, **kwargs)
        ctx = OperationContext(output, len(self._calls[operation]))
        decision = decision_of(policy, ctx, operation, args, kwargs)
        if not properties.makes_tensors:
            return output
        result = None
        if decision.keeps:
            self._observe_inputs(args, kwargs)
            result = self._keep(operation, output, start)
            result.is_optional = decision.is_optional
            offloads = decision.offloads
            if self._offloads_large:
                offloads = offloads or sum(map(size_of, result.tensors)) >= LARGE
            if offloads and self._host_stream is not CPUStream:
                result.store(Offload(self._host_stream), self._stream)
        self._calls[operation].append(result)
        return output

    def _keep(self, operation: Any, output: Any, start: States) -> KeptResult:
        if in_compiled_code():
            raise _compiled()  # Its code may reuse the memory of the result.
        end: States = {}
        if operation_of(operation).may_draw:
            end = self._draws.position()
        with unseen():
            result = KeptResult(output, start, end)
            for x in result.tensors:
                self._by_memory[local_storage_id(x)].append(result)
        return result

    def _observe_inputs(self, args: Any, kwargs: Any) -> None:
        """Copy some elements of the inputs: [Note: Inputs of kept operations]."""
        if self._policy is keep_everything:
            return  # The nodes have saved these tensors in the first pass.
        with unseen():
            for x in tree_leaves((args, kwargs)):
                elements = few_elements_of(x) if isinstance(x, Tensor) else None
                if elements is not None:
                    self._inputs[elements.dtype].append(elements.flatten().clone())

    def _next_call(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return the kept result of an operation in a recomputation, or run it."""
        properties = operation_of(operation)
        if self._policy is None or not properties.makes_tensors:
            return operation(*args, **kwargs)
        number = self._numbers[operation]
        self._numbers[operation] += 1
        results = self._calls[operation]
        result = None
        if number < len(results):
            result = results[number]
        if result is not None:
            self._observe_inputs(args, kwargs)
        if result is None or not result.is_valid:  # (2)
            return operation(*args, **kwargs)
        if properties.may_draw:
            self._draws.go_to(result.start, result.end)
        with unseen():
            output = result.value(self._stream)
        if self._releases:
            result.drop()
        return output

    # --- modules with another policy

    def _run(self, hooks: saved_tensors_hooks, function: Callable[[], T]) -> T:
        """Run a function while calls of modules set their policies.

        The function that replaces their forward is not part of a compiled layer around it.
        """
        swaps = []
        for module, policy in self._scopes.modules.items():
            name = name_of_call(module)
            call = partial(self._call, hooks, policy, getattr(module, name))
            swaps.append(entry(module.__dict__, name, untraced(call)))
        with substituted(swaps):
            return function()

    def _call(
        self,
        hooks: saved_tensors_hooks,
        policy: Policy | None,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outside = self._policy
        self._policy = policy
        try:
            if policy is keep_everything:
                return self._without(hooks, partial(forward, *args, **kwargs))
            return forward(*args, **kwargs)
        finally:
            self._policy = outside

    def _without(self, hooks: saved_tensors_hooks, function: Callable[[], T]) -> T:
        """Call a function without these hooks, unless others are active within them."""
        if innermost_hooks() != (hooks.pack_hook, hooks.unpack_hook):
            return function()
        hooks.__exit__()
        try:
            users_hooks = innermost_hooks()
            if users_hooks is None:
                return function()
            pack, unpack = self.hooks_aside(users_hooks)
            with saved_tensors_hooks(pack, unpack):
                return function()
        finally:
            hooks.__enter__()
