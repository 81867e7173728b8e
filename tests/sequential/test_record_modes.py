"""Modes that a model runs in: autocast around it, grad mode, and training or evaluation."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential.test_record import Inner, Model, check, sample
from torchgpipe import GPipe
from torchgpipe.sequential import ConversionError, from_stages, to_sequential


def test_a_program_that_goes_by_autocast_around_the_call():
    """In v0.8.2, it went the way of the conversion in each call."""
    for asks in [
        lambda x: torch.is_autocast_enabled('cpu'),
        lambda x: torch.is_autocast_enabled(x.device.type),
        lambda x: torch.get_autocast_dtype('cpu') == torch.float16,
    ]:
        model = Model(lambda m, x: x * (2 if asks(x) else 3))
        x, autocast = sample(), torch.autocast('cpu', dtype=torch.float16)
        layers = pickle.loads(pickle.dumps(to_sequential(model, x)))
        assert torch.equal(layers(x), model(x)), asks
        with autocast, pytest.raises(ValueError, match='autocast_.* was False; it is True now'):
            layers(x)
        with autocast:
            layers = to_sequential(model, x)
            assert torch.equal(layers(x), model(x)), asks
        with pytest.raises(ValueError, match='autocast_.* was True; it is False now'):
            layers(x)


def test_pytorch_s_own_modules_ask_for_autocast_without_a_guard():
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(block, 2)
    x = torch.randn(4, 5, 6)
    layers = to_sequential(model, x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(layers(x), model(x))


# --- training and evaluation
# -------------------------------------------------------------------------------------------------


class WithAuxiliary(nn.Module):
    """A model with one more result in training."""

    def __init__(self):
        super().__init__()
        self.main, self.aux = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return (self.main(x), self.aux(x)) if self.training else self.main(x)


def added(m, x):
    x = m.inner(x)
    return x[0] + x[1] if isinstance(x, tuple) else x


def test_a_form_that_goes_by_the_training_mode():
    """In v0.8.2, the number of samples was blamed for it."""
    for training in [True, False]:
        model = Model(added)
        model.inner = WithAuxiliary()
        model.train(training)
        with pytest.raises(
            ConversionError,
            match='fails in one mode: .* in training than '
            'in evaluation.*use_mems_eval = False.*auxiliary heads.*leaves.*'
            'check_sample=False',
        ) as found:
            to_sequential(model, sample())
        assert 'by their size' not in str(found.value), training
        layers, x = to_sequential(model, sample(), check_sample=False), sample()
        assert torch.equal(layers(x), model(x)), training
        if training:
            with pytest.raises(
                ValueError, match=r'value was \(tensor, tensor\); it is tensor now'
            ):
                layers.eval()(x)
        outer = nn.Sequential(nn.Linear(6, 6), model).train(training)
        assert len(to_sequential(outer, x, leaves=['1'])) == 2, training


class Freezes(nn.Module):
    """A module that keeps some of its submodules in evaluation mode."""

    def __init__(self, inner, kinds=(nn.BatchNorm1d, nn.Linear)):
        super().__init__()
        self.inner, self.outside, self.kinds = inner, nn.Linear(6, 6), kinds

    def forward(self, x):
        return self.outside(self.inner(x))

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, self.kinds):
                module.training = False
        return self


def normalized(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(6, 6), norm(6))


def test_a_train_of_its_own_that_layers_would_not_run():
    """In v0.8.2, batch normalization continued in training, unnoticed if nothing was compared."""
    for check_sample in [True, False]:
        x, root = sample(), Freezes(normalized())
        with pytest.raises(
            ConversionError,
            match=r'(?s)^Freezes .*after model.train\(\), inner.1 '
            r'would be in training mode.*in train\n.*class Frozen',
        ):
            to_sequential(root, x, check_sample=check_sample)
        with pytest.raises(
            ConversionError, match=r"(?s)^'1' \(Freezes\).* 1.inner.1 .*leaves=\['1'"
        ):
            to_sequential(
                nn.Sequential(nn.Linear(6, 6), Freezes(normalized())), x, check_sample=check_sample
            )
        model = nn.Sequential(nn.Linear(6, 6), Freezes(normalized()))
        layers = to_sequential(model, x, leaves=['1'], check_sample=check_sample).train()
        assert not model[1].inner[1].training, check_sample
        assert torch.equal(layers(x), model(x)), check_sample


def test_a_train_that_is_set_on_a_module():
    model = nn.Sequential(nn.Linear(6, 6), normalized().eval())
    model[1].train = lambda mode=True: None
    with pytest.raises(ConversionError, match=r'(?s)1.1 would be in training .* in <lambda>'):
        to_sequential(model, sample())


def test_a_layer_that_keeps_its_own_mode():
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    assert len(to_sequential(Freezes(normalized(Frozen)), sample())) == 2


def test_a_train_of_its_own_that_makes_no_difference():
    assert len(to_sequential(Freezes(normalized(), nn.Linear), sample())) == 2


class Reads(nn.Module):
    """A module that depends on the mode of another module."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, x):
        return self.other(x) if self.other.training else self.other(x) + 1


def test_the_mode_of_a_leaf_that_another_module_asks_for():
    """In v0.9.0, each call used the mode of the conversion."""
    check(Model(lambda m, x: F.dropout(x, 0.5, m.a.training)), sample())
    with pytest.raises(ConversionError, match='(?s)goes by the training mode.*m.a.training'):
        to_sequential(Model(lambda m, x: x * 2 if m.a.training else x), sample())
    model = nn.Sequential(nn.Linear(6, 6), Reads(nn.Linear(6, 6)))
    assert [whole.name for whole in check(model, sample()).wholes] == ['1']


def test_a_constant_that_goes_by_the_mode():
    """In v0.9.0, one in a list or a keyword kept the conversion's mode, if not compared."""
    for function in [
        lambda x, y: x + y,
        lambda x, y: torch.stack([x, y]).sum(0),
        lambda x, y: torch.add(x, other=y),
        lambda x, y: torch.where(x > 0, x, y),
    ]:
        tables = [torch.ones(4, 6), torch.zeros(4, 6)]
        model = nn.Sequential(nn.Linear(6, 6), Inner(lambda m, x: function(x, tables[m.training])))
        check(model, sample(), check_sample=False)


def test_the_mode_of_a_module_within_a_leaf():
    """In v0.9.0, it was a constant, which was not detected on the meta device."""
    for function in (
        lambda m, x: F.dropout(x, 0.5, m.leaf[0].training),
        lambda m, x: x if m.leaf[0].training else -x,
    ):
        for device in ('meta', 'cpu'):
            model = Model(function).to(device)
            model.leaf = nn.Sequential(nn.Linear(6, 6)).to(device)
            inputs = sample()
            try:
                layers = to_sequential(
                    model, inputs.to(device), leaves=['leaf'], check_sample=False
                )
            except ConversionError as error:
                assert 'goes by the training mode' in str(error) and '-x' in str(error)
                continue
            layers.train().to_empty(device='cpu')
            for mode in (False, True):
                layers.train(mode)
                for p in layers.parameters():
                    nn.init.ones_(p)
                assert (layers(inputs) != layers(inputs)).any() == mode


def test_an_attribute_read_in_one_mode_is_guarded_and_makes_no_leaf():
    """In v0.9.0, the module stayed whole."""
    for training in [True, False]:
        for asks_in in [True, False]:

            def function(m, x):
                asks = m.training if asks_in else not m.training
                return x if asks and x.dim() != 2 else x.neg()

            model = nn.Sequential(nn.Linear(6, 6), Inner(function)).train(training)
            layers = check(model, sample())
            assert layers.wholes == [], (training, asks_in)
            with pytest.raises(ValueError, match=r'dim\(\) != 2 was False; it is True now'):
                layers(sample()[None])


def test_a_guard_that_is_another_one_in_each_mode_makes_a_leaf():
    for training in [True, False]:

        def function(m, x):
            return x.neg() if (x.dim() == 2 if m.training else x.dim() != 3) else x

        model = nn.Sequential(nn.Linear(6, 6), Inner(function)).train(training)
        assert [whole.name for whole in check(model, sample()).wholes] == ['1'], training


def test_a_leaf_has_its_mode_by_itself_where_others_have_its_parts_too():
    model = Model(lambda m, x: m.reads(m.a(x)))
    model.reads = Reads(model.a)
    check(model, sample(), leaves=['reads'])


# --- gradients within a forward
# -------------------------------------------------------------------------------------------------


class Forces(nn.Module):
    """An energy of each sample, and its gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        energy = self.layer(x).tanh().sum(-1)
        (grad,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -grad


class Physics(nn.Module):
    """A model with forces in it."""

    def __init__(self):
        super().__init__()
        self.inside, self.forces, self.outside = nn.Linear(6, 6), Forces(), nn.Linear(6, 6)

    def forward(self, x):
        energy, forces = self.forces(self.inside(x))
        return energy, self.outside(forces)


def test_a_leaf_that_needs_gradients_in_its_own_forward():
    """In v0.8.2, such a model could not be converted at all."""
    for check_sample in [True, False]:
        for grad in [True, False]:
            model, x = Physics(), sample()
            with torch.set_grad_enabled(grad):
                layers = to_sequential(model, x, leaves=['forces'], check_sample=check_sample)
                found = from_stages(
                    model,
                    [model.inside, model.forces, lambda m, x: (x[0], m.outside(x[1]))],
                    x,
                    check_sample=check_sample,
                )
            assert len(layers) == len(found) == 3, (check_sample, grad)
            pipe = GPipe(layers, [1, 2], devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='never')
            results = []
            for each in (model, pipe, found):
                model.zero_grad()
                outputs = each(x)
                sum(output.square().sum() for output in outputs).backward()
                results.append([*outputs, *(p.grad for p in model.parameters())])
            for others in results[1:]:
                assert all(map(torch.allclose, results[0], others)), (check_sample, grad)


def test_a_tensor_that_requires_grad_and_is_no_leaf_gets_a_way_out():
    with pytest.raises(ConversionError, match=r"(?s)'forces'.*require grad.*leaves=\['forces'"):
        to_sequential(Physics(), sample())
    with pytest.raises(ConversionError, match='(?s)not require grad.*name it as a leaf'):
        to_sequential(Forces(), sample())


def test_a_leaf_with_hooks_on_its_tensors():
    def hooked(m, x):
        y = x.tanh()
        for each in (x, y):
            each.register_hook(lambda grad: 2 * grad)
        return y

    check(nn.Sequential(nn.Linear(6, 6), Inner(hooked), nn.Linear(6, 6)), sample(), leaves=['1'])


def test_an_error_of_a_model_is_not_hidden_by_another_try():
    calls = []

    def failing(m, x):
        calls.append(x)
        raise RuntimeError('of its own')

    with pytest.raises(RuntimeError, match='of its own'):
        to_sequential(Model(failing), sample())
    assert len(calls) == 1
