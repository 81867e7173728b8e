"""Export on a mesh: whole tensors by their names in files, as a stream or into a folder.

All ranks go through the layers in one order. The ranks with a layer gather its tensors; one of
them writes these to its file, or the ranks that ask for a stream get them::

    layer 0    ranks 0, 1: parts ── gather ──▶ whole ──▶ file of rank 0
                                                └─ broadcast along the pipe ──▶ ranks that ask
    layer 1    ranks 2, 3: parts ── gather ──▶ whole ──▶ file of rank 2
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchgpipe.distributed.agreement import Facts, check_settings, digest
from torchgpipe.distributed.mesh import MeshInfo
from torchgpipe.distributed.rank import Rank
from torchgpipe.model.export import (
    AdapterNames,
    FileNames,
    FilePlan,
    NewFolder,
    OpenFiles,
    Size,
    TensorSpec,
    check_names,
    finish,
    plan_files,
    trim_memory,
)
from torchgpipe.model.export import save_adapter as save_whole_adapter
from torchgpipe.model.pretrained import Original
from torchgpipe.model.weights import StrPath
from torchgpipe.shard.collectives import broadcast, gathered

#: By layer, its tensors without values.
LayerSpecs = Mapping[str, list[TensorSpec]]

#: The bytes of a tensor whose memory is returned to the system at once.
_LARGE = 1 << 22


def names_of(rank: Rank, original: Original | None) -> FileNames:
    """Return the names in files of a model's tensors."""
    ties = []
    for tie in rank.description.ties:
        ties.append([full for _, full in tie])
    return FileNames(original, ties)


def _agree_on_specs(
    rank: Rank,
    names: FileNames,
    task: str,
    *settings: object,
    begin: Callable[[], object] = bool,
) -> list[LayerSpecs]:
    """Return the tensors of the layers of each rank along the pipe axis, without values.

    Args:
        settings: Arguments that are the same on all ranks.
        begin: Called on each rank in the end. All ranks raise the error of one.
    """
    specs: dict[str, list[TensorSpec]] = {}
    all_specs: list[TensorSpec] = []

    def read() -> Facts:
        for name, layer in rank.layers.items():
            specs[name] = names.specs(name, layer)
        begin()
        return Facts(settings=digest(*settings), state=rank.state_of_layers())

    facts = rank.agree(task, read, Facts())
    check_settings(task, facts)
    rank.check_states(facts)
    by_place: list[LayerSpecs] = [specs]
    if rank.mesh.pipe.group is not None:
        by_place = gathered(specs, rank.mesh.pipe.group)
    for layers in by_place:
        all_specs += chain(*layers.values())
    check_names(all_specs)
    return by_place


def save(
    rank: Rank, names: FileNames, original: Original | None, folder: StrPath, max_shard_size: Size
) -> None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save_pretrained`."""
    task = 'saving a model'
    new = NewFolder(folder)
    is_first = not rank.mesh.number

    def begin() -> None:
        if is_first:
            new.begin()

    def end() -> Facts:
        if is_first:
            finish(new, files, original)
        return Facts()

    try:
        # Hosts may have mounted the folder in different places.
        by_place = _agree_on_specs(rank, names, task, new.folder.name, max_shard_size, begin=begin)
        by_owner: list[list[TensorSpec]] = []
        for layers in by_place:
            by_owner.append([*chain(*layers.values())])
        files = plan_files(by_owner, max_shard_size)
        _write(rank, names, files, new, task)
        rank.agree(task, end, Facts())
    except BaseException:
        if is_first:
            new.abort()
        raise


def _write(rank: Rank, names: FileNames, files: list[FilePlan], new: NewFolder, task: str) -> None:
    """Gather all tensors of this rank's layers, and write the ones that belong to its files.

    An error is kept until all tensors are gathered, because ranks wait for each other.
    """
    opened = OpenFiles(_files_of(rank, files), new.path)
    error: Exception | None = None
    try:
        for name, layer in rank.layers.items():
            for key, tensor in names.tensors(name, layer, _gather(rank.mesh)):
                try:
                    if error is None:
                        opened.write(key, tensor)
                except Exception as raised:
                    error = raised
                is_large = tensor.nbytes > _LARGE
                del tensor
                if is_large:
                    trim_memory()
    finally:
        opened.close()

    def check() -> Facts:
        if isinstance(error, FileNotFoundError):
            raise RuntimeError(
                f'{new.path}, which the first rank has made, is not there: all ranks need a '
                'folder on a file system that they share'
            ) from error
        if error is not None:
            raise error
        opened.check()
        return Facts()

    rank.agree(task, check, Facts())


def _files_of(rank: Rank, files: list[FilePlan]) -> list[FilePlan]:
    """Return the files that a rank writes: ranks with the same stages take turns."""
    place = rank.mesh.pipe.rank
    members = sorted(rank.mesh.same_stages[place])
    of_place = [file for file in files if file.owner == place]
    return of_place[members.index(rank.number) :: len(members)]


def save_adapter(
    rank: Rank,
    original: Original | None,
    folder: StrPath,
    watch: Callable[[], AbstractContextManager[None]],
) -> None:
    """Save adapters on all ranks: see :meth:`DistributedGPipe.save_adapter`."""
    task = 'saving an adapter'
    is_first = not rank.mesh.number
    all_names: list[AdapterNames] = []

    def begin() -> Facts:
        all_names.append(AdapterNames(original))
        return Facts(settings=digest(NewFolder(folder).folder.name))

    def write() -> Facts:
        if is_first:
            save_whole_adapter(names, tensors.items(), folder)
        return Facts()

    check_settings(task, rank.agree(task, begin, Facts()))
    (names,) = all_names
    tensors = {}
    for name, tensor in stream(rank, names, is_first, watch):
        tensors[name] = tensor.cpu()
    rank.agree(task, write, Facts())


def stream(
    rank: Rank,
    names: FileNames,
    full: bool,
    watch: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model on all ranks: see :meth:`DistributedGPipe.named_tensors`.

    Args:
        watch: Returns the context of the communication for a tensor.
    """
    mesh = rank.mesh
    with watch():
        by_place = _agree_on_specs(rank, names, 'a stream of tensors')
        asks = [full]
        if mesh.pipe.group is not None:
            asks = gathered(full, mesh.pipe.group)
    remaining = 0
    for layers_of_place in by_place:
        remaining += len([*chain(*layers_of_place.values())])
    for place, name in _layers_in_order(rank):
        others_ask = any(asks[:place]) or any(asks[place + 1 :])
        tensors: Iterator[tuple[str, Tensor]] = iter(())
        if name in rank.layers:
            tensors = names.tensors(name, rank.layers[name], _gather(mesh))
        for spec in by_place[place][name]:
            with watch():
                key, tensor = next(tensors, (spec.name, None))
                assert key == spec.name
                if others_ask:
                    tensor = _send(mesh, place, spec, tensor)
            remaining -= 1
            if full:
                assert tensor is not None
                try:
                    yield spec.name, tensor
                except GeneratorExit:
                    _report_end(remaining, watch)
                    raise
            tensor = None


def _layers_in_order(rank: Rank) -> Iterator[tuple[int, str]]:
    """Yield the layers of the model: the rank along the pipe axis that has each, and its name."""
    for place, layers in zip(rank.placement.places, rank.stages):
        for name in layers:
            yield place, name


def _report_end(remaining: int, watch: Callable[[], AbstractContextManager[None]]) -> None:
    """Report to other ranks that the loop on this one has ended early."""
    if remaining:
        with suppress(RuntimeError), watch():
            raise RuntimeError(
                f'the loop over named_tensors() ended {remaining} tensors early; all ranks '
                'iterate to the end'
            )


def _send(mesh: MeshInfo, place: int, spec: TensorSpec, tensor: Tensor | None) -> Tensor:
    """Broadcast a tensor from a place along the pipe axis."""
    assert mesh.pipe.group is not None
    if tensor is None:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device)
    tensor = tensor.to(mesh.device).contiguous()
    # As bytes, because groups do not send all dtypes.
    broadcast(tensor.flatten().view(torch.uint8), mesh.pipe.group, place)
    return tensor


def _gather(mesh: MeshInfo) -> Callable[[Tensor], Tensor]:
    """Return the function that gathers a tensor of which each rank has a part."""

    def gather(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        # Shards of CPUOffloadPolicy are on the host, where a device's group cannot gather.
        on_device: Any = value.to(mesh.device)
        whole: Tensor = on_device.full_tensor()
        return whole

    return gather
