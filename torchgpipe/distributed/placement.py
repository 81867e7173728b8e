"""The placement of a model on a mesh: the rank of each stage, and how parameters are split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from torchgpipe.schedule.messages import ACTIVE

#: The uses of parameters along the data axis.
DATA = ('replicate', 'shard')


@dataclass(frozen=True)
class Placement:
    """The placement of a model: arguments of :class:`~torchgpipe.distributed.DistributedGPipe`."""

    #: The rank along the pipe axis of each stage.
    places: Sequence[int]
    data: str
    tensor_plan: Mapping[str, Any]
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    #: How many units are whole at a time; ``None`` for the default.
    max_active_stages: int | None = None

    @property
    def policies(self) -> dict[str, Any]:
        """The policies of FSDP2 that were given, by their arguments."""
        policies = {'mp_policy': self.mp_policy, 'offload_policy': self.offload_policy}
        return {name: policy for name, policy in policies.items() if policy}

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """The dtypes of parameters, reductions and outputs."""
        return self.mp_policy or MixedPrecisionPolicy()

    @property
    def offloads(self) -> bool:
        """Whether parameters wait on the host."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def active_units(self) -> int:
        """How many units are whole at a time."""
        return self.max_active_stages or (1 if self.offloads else ACTIVE)

    @property
    def gathers_again(self) -> bool:
        """Whether ranks with units free their parameters, and gather them again, in a step."""
        return max(map(self.places.count, self.places)) > self.active_units

    def check(self, mesh: DeviceMesh) -> None:
        """Check that arguments fit each other and the mesh.

        Raises:
            ValueError: They do not.
        """
        if self.data not in DATA:
            raise ValueError(f'data must be one of {DATA}, but is {self.data!r}')
        most = self.max_active_stages
        if most is not None and (self.data != 'shard' or most < 1):
            raise ValueError(
                "max_active_stages is a positive number, with data='shard' only, "
                f'but is {most}, with data={self.data!r}'
            )
        has_axis = 'data' in (mesh.mesh_dim_names or ())
        if self.policies and (self.data != 'shard' or not has_axis):
            raise ValueError(
                f"{' and '.join(self.policies)} are of FSDP2: they take data='shard' "
                'and a mesh with a data axis, which may have one rank'
            )


def parse_places(places: Sequence[int] | None, stages: int, ranks: int) -> list[int]:
    """Return the rank along the pipe axis of each stage.

    Raises:
        ValueError: A rank has no stage, or a stage has no rank.
    """
    if places is None:
        places = [j % ranks for j in range(stages)]
    result = [*places]
    if len(result) != stages or {*result} != {*range(ranks)}:
        raise ValueError(
            f'each of {ranks} ranks along the pipe axis takes at least one of '
            f'{stages} stages, but places are {result}; give the balance a number for '
            'each stage'
        )
    return result
