"""Pickles of earlier versions: the paths in them lead to the classes of this version."""
import pickle

import pytest

import torchgpipe.shard as ts
from torchgpipe import Arguments, NoChunk
from torchgpipe.balance import Balance, LayerProfile, Profile, SkipProfile
from torchgpipe.plan import Costs, Link, Plan, Simulation, StageCosts
from torchgpipe.schedule import Action, Timed
from torchgpipe.skip import Namespace
from torchgpipe.timeline import Copied

CLASSES = {'structure': [Arguments, NoChunk], 'balance.profiled': [Balance, Profile],
           'predict.blocks': [LayerProfile, SkipProfile],
           'predict.costs': [Costs, Link, StageCosts], 'predict.simulate': [Simulation],
           'plan.choice': [Plan], 'schedule.action': [Action, Timed],
           'skip.namespace': [Namespace], 'timeline.lanes': [Copied],
           'shard.gradients': [ts.GradScaler],
           'shard.nn.tag': [ts.nn.ParallelDropout, ts.nn.RegisterParallelDim]}


@pytest.mark.parametrize('path', CLASSES)
def test_in_v0161_a_pickle_had_classes_at_other_paths(path):
    for each in CLASSES[path]:
        assert pickle.loads(f'ctorchgpipe.{path}\n{each.__name__}\n.'.encode()) is each
