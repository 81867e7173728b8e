"""Bytes that a rank sends in a step, along each axis of the mesh."""

from collections.abc import Iterable

from benchmarks.experiments.scaling.meshes import Mesh

#: The axis of an operation, its name, and its bytes.
Operation = tuple[str, str, int]


def sent(name: str, bytes: int, size: int) -> float:
    """Return the bytes that a rank sends in an operation, of rings of ranks.

    >>> sent('allreduce', 100, 4), sent('allgather', 100, 4), sent('send', 100, 4)
    (150.0, 75.0, 100.0)

    Args:
        name: The name of the operation.
        bytes: The size of its input or its output, whichever is larger.
        size: The number of ranks.
    """
    if 'recv' in name:
        return 0.0
    if 'send' in name:
        return float(bytes)
    steps = 2 if 'reduce' in name and 'scatter' not in name else 1
    return steps * bytes * (size - 1) / size


def totals(operations: Iterable[Operation], mesh: Mesh) -> dict[str, float]:
    """Return the bytes that a rank sends, by axis."""
    found: dict[str, float] = {}
    for axis, name, bytes in operations:
        size = mesh.axes.get(axis, mesh.size)
        found[axis] = found.get(axis, 0.0) + sent(name, bytes, size)
    return {axis: value for axis, value in found.items() if value}
