"""Lightning: a pipeline within a LightningModule."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.devices import places
from tests.tools.models import STEPS, assert_equal, plain, samples, sgd, trained, wrapped
from tests.tools.page import RECIPES
from tests.tools.rows import works
from torchgpipe import GPipe


def module_of(net):
    """Return a LightningModule of a model."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            input, label = batch
            return cross_entropy(self.net(input), label.to(self.net_device()))

        def net_device(self):
            return net.devices[-1] if isinstance(net, GPipe) else 'cpu'

        def configure_optimizers(self):
            return sgd(self)

    return Module()


def trainer(folder, **options):
    """Return a Trainer that says nothing and keeps its files in a folder."""
    import lightning

    return lightning.Trainer(
        accelerator='cpu',
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        **options,
    )


def loader():
    """Return all batches."""
    return DataLoader(TensorDataset(*samples()), 5)


@works(
    'Lightning',
    '`Trainer.fit` of a `LightningModule` that has a `GPipe`; `save_checkpoint`',
    'lightning',
)
def test_fit(tmp_path):
    module = module_of(wrapped())
    first = trainer(tmp_path, max_steps=STEPS)
    first.fit(module, loader())
    assert_equal(module.net, trained())
    first.save_checkpoint(tmp_path / 'a.ckpt')
    state = torch.load(tmp_path / 'a.ckpt', weights_only=True)['state_dict']
    loaded = module_of(plain())
    loaded.load_state_dict(state)
    assert_equal(loaded.net, trained())


@works(
    'Lightning', 'a checkpoint continues with another balance, or without a pipeline', 'lightning'
)
def test_go_on(tmp_path):
    begun = module_of(wrapped())
    first = trainer(tmp_path, max_steps=STEPS - 1)
    first.fit(begun, loader())
    first.save_checkpoint(tmp_path / 'a.ckpt')
    ends = []
    for net in (plain(), wrapped([1, 2, 1])):
        module = module_of(net)
        again = trainer(tmp_path, max_steps=2 * STEPS, max_epochs=-1)
        again.fit(module, loader(), ckpt_path=tmp_path / 'a.ckpt')
        assert again.global_step == 2 * STEPS
        ends.append(module.net)
    assert_equal(ends[1], ends[0])


@works(
    'Lightning', 'a `GPipe` on several devices, with a strategy that does not move it', 'lightning'
)
@pytest.mark.accelerator
def test_a_strategy(tmp_path, monkeypatch):
    from lightning.pytorch.accelerators import CPUAccelerator

    # Lightning does not know the simulated accelerator.
    monkeypatch.setattr(CPUAccelerator, 'setup_device', lambda self, device: None)
    names = {}
    exec(RECIPES['lightning'][1].partition('\ntrainer =')[0], names)
    net = GPipe(plain(), [2, 2], devices=places('aa'), chunks=3)
    module = module_of(net)
    run = trainer(tmp_path, max_steps=STEPS, strategy=names['WhereItIs'](device=net.devices[0]))
    run.fit(module, loader())
    assert_equal(net, trained())
    assert [net[0].weight.device, net[3].weight.device] == net.devices
    other = trainer(
        tmp_path, max_steps=STEPS, strategy=names['SingleDeviceStrategy'](device=net.devices[0])
    )
    with pytest.raises(TypeError, match='denied to move'):
        other.fit(module, loader())
