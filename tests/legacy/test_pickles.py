"""Pickles of earlier versions: the paths in them lead to the objects of this version."""

import pickle

import torchgpipe.shard as ts
from torchgpipe import Arguments, NoChunk
from torchgpipe.balance import Balance, LayerProfile, Profile, SkipProfile
from torchgpipe.model.weights import open_weights
from torchgpipe.plan import Costs, Link, Plan, Simulation, StageCosts
from torchgpipe.schedule import Action, Timed
from torchgpipe.sequential import ConversionError, operations, optimizer_state
from torchgpipe.skip import Namespace
from torchgpipe.timeline import Copied

OBJECTS = {
    'structure': [Arguments, NoChunk],
    'balance.profiled': [Balance, Profile],
    'predict.blocks': [LayerProfile, SkipProfile],
    'predict.costs': [Costs, Link, StageCosts],
    'predict.simulate': [Simulation],
    'plan.choice': [Plan],
    'schedule.action': [Action, Timed],
    'skip.namespace': [Namespace],
    'skip.tracker': [Namespace],
    'timeline.lanes': [Copied],
    'sequential.nodes': [
        operations.guard,
        operations.guard_ways,
        operations.is_same,
        operations.apply,
        operations.put_together,
        operations.take_apart,
    ],
    'sequential.errors': [ConversionError],
    'sequential.optimizers': [optimizer_state],
    'weights': [open_weights],
    'shard.gradients': [ts.GradScaler],
    'shard.nn.tag': [ts.nn.ParallelDropout, ts.nn.RegisterParallelDim],
}


def test_in_v0161_a_pickle_had_objects_at_other_paths():
    for path in OBJECTS:
        for each in OBJECTS[path]:
            assert pickle.loads(f'ctorchgpipe.{path}\n{each.__name__}\n.'.encode()) is each
