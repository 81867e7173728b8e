"""Export on a mesh: whole tensors by their names in files, as a stream or into a folder.

All ranks go through the layers in one order. The ranks with a layer gather its tensors; one of
them writes these to its file, or the ranks that ask for a stream get them::

    layer 0    ranks 0, 1: parts ── gather ──▶ whole ──▶ file of rank 0
                                                └─ broadcast along the pipe ──▶ ranks that ask
    layer 1    ranks 2, 3: parts ── gather ──▶ whole ──▶ file of rank 2
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
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
    Size,
    TensorFile,
    TensorForm,
    finish,
    plan_files,
    trim_memory,
)
from torchgpipe.model.export import save_adapter as save_whole
from torchgpipe.model.pretrained import Original
from torchgpipe.model.weights import StrPath
from torchgpipe.shard.collectives import broadcast, gathered

#: By layer, the forms of its tensors.
LayerForms = Mapping[str, list[TensorForm]]


#: The bytes of a tensor whose memory is returned to the system at once.
_LARGE = 1 << 22


def names_of(rank: Rank, original: Original | None) -> FileNames:
    """Return the names in files of a model's tensors."""
    ties = []
    for tie in rank.description.ties:
        ties.append([full for _, full in tie])
    return FileNames(original, ties)


def save(
    rank: Rank, names: FileNames, original: Original | None, folder: StrPath, max_shard_size: Size
) -> None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save_pretrained`."""
    task = 'saving a model'
    new = NewFolder(folder)
    forms: dict[str, list[TensorForm]] = {}
    files: list[FilePlan] = []

    def begin() -> Facts:
        for name, layer in rank.layers.items():
            forms[name] = names.forms(name, layer)
        if not rank.mesh.number:
            new.begin()
        return Facts(
            settings=digest(new.folder.name, max_shard_size), state=rank.state_of_layers()
        )

    def check_written() -> Facts:
        writing.check()
        return Facts()

    def end() -> Facts:
        if not rank.mesh.number:
            finish(new, files, original)
        return Facts()

    try:
        facts = rank.agree(task, begin, Facts())
        check_settings(task, facts)
        rank.check_states(facts)
        by_place = _by_place(rank.mesh, forms)
        by_owner: list[list[TensorForm]] = []
        for layers in by_place:
            by_owner.append([*chain(*layers.values())])
        files = plan_files(by_owner, max_shard_size)
        writing = _Writing(rank, files, new)
        for name, layer in rank.layers.items():
            for key, tensor in names.tensors(name, layer, _gather(rank.mesh)):
                writing.write(key, tensor)
                is_large = tensor.nbytes > _LARGE
                del tensor
                if is_large:
                    trim_memory()
        rank.agree(task, check_written, Facts())
        rank.agree(task, end, Facts())
    except BaseException:
        if not rank.mesh.number:
            new.abort()
        raise


def save_adapter(
    rank: Rank,
    original: Original | None,
    folder: StrPath,
    watch: Callable[[], AbstractContextManager[None]],
) -> None:
    """Save adapters on all ranks: see :meth:`DistributedGPipe.save_adapter`."""
    task = 'saving an adapter'
    names: list[AdapterNames] = []

    def begin() -> Facts:
        names.append(AdapterNames(original))
        return Facts(settings=digest(NewFolder(folder).folder.name), state=rank.state_of_layers())

    def write() -> Facts:
        if is_first:
            save_whole(names[0], tensors.items(), folder)
        return Facts()

    facts = rank.agree(task, begin, Facts())
    check_settings(task, facts)
    rank.check_states(facts)
    is_first = not rank.mesh.number
    tensors = {}
    for name, tensor in stream(rank, names[0], is_first, watch):
        tensors[name] = tensor.cpu()
    rank.agree(task, write, Facts())


class _Writing:
    """The files that this rank writes.

    An error is kept until all ranks have gathered their tensors, because they wait for each other.
    """

    def __init__(self, rank: Rank, files: list[FilePlan], new: NewFolder) -> None:
        self._folder = new.path
        self._error: Exception | None = None
        self._streams: dict[str, TensorFile] = {}
        #: By name of a tensor, the file of this rank that has it.
        self._files: dict[str, FilePlan] = {}
        place = rank.mesh.pipe.rank
        members = sorted(rank.mesh.same_stages[place])
        mine = [file for file in files if file.owner == place]
        # The ranks with the same stages take turns.
        for file in mine[members.index(rank.number) :: len(members)]:
            for form in file.forms:
                self._files[form.name] = file

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, if it belongs to a file of this rank."""
        file = self._files.get(name)
        if file is None or self._error is not None:
            return
        try:
            if file.name not in self._streams:
                self._streams[file.name] = self._open(file)
            self._streams[file.name].write(name, tensor)
        except Exception as error:
            self._error = error

    def _open(self, file: FilePlan) -> TensorFile:
        if not self._folder.is_dir():
            raise RuntimeError(
                f'{self._folder}, which the first rank has made, is not there: all ranks need a '
                'folder on a file system that they share'
            )
        return TensorFile(self._folder / file.name, file.forms)

    def check(self) -> None:
        """Close all files; raise the first error."""
        for stream in self._streams.values():
            stream.abort()
        if self._error is not None:
            raise self._error


def stream(
    rank: Rank,
    names: FileNames,
    full: bool,
    watch: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model on all ranks: see :meth:`DistributedGPipe.named_tensors`.

    Args:
        watch: Returns the context of the communication for a layer.
    """
    mesh = rank.mesh
    with watch():
        forms = {}
        for name, layer in rank.layers.items():
            forms[name] = names.forms(name, layer)
        by_place = _by_place(mesh, forms)
        asks = {mesh.pipe.ranks[mesh.pipe.rank]: full}
        if mesh.pipe.group is not None:
            asks = dict(zip(mesh.pipe.ranks, gathered(full, mesh.pipe.group)))
    for j, layers in enumerate(rank.stages):
        place = rank.placement.places[j]
        is_sent = sum(asks.values()) > asks[mesh.pipe.ranks[place]]
        for name in layers:
            tensors: Iterator[tuple[str, Tensor]] = iter(())
            if name in rank.layers:
                tensors = names.tensors(name, rank.layers[name], _gather(mesh))
            for form in by_place[place][name]:
                with watch():
                    _, tensor = next(tensors, ('', None))
                    if is_sent:
                        tensor = _send(mesh, place, form, tensor)
                if full:
                    assert tensor is not None
                    yield form.name, tensor
                tensor = None


def _send(mesh: MeshInfo, place: int, form: TensorForm, tensor: Tensor | None) -> Tensor:
    """Broadcast a tensor from a place along the pipe axis."""
    assert mesh.pipe.group is not None
    if tensor is None:
        tensor = torch.empty(form.shape, dtype=form.dtype, device=mesh.device)
    return broadcast(tensor.to(mesh.device).contiguous(), mesh.pipe.group, place)


def _by_place(mesh: MeshInfo, forms: LayerForms) -> list[Any]:
    """Return the forms of the layers of each rank along the pipe axis."""
    if mesh.pipe.group is None:
        return [forms]
    return gathered(forms, mesh.pipe.group)


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
