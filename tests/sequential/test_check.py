"""Differences found by the comparison with the model, and state that a conversion leaves
unchanged."""

import random

import pytest
import torch
from torch import nn

from tests.sequential.test_record import Model
from torchgpipe import Arguments
from torchgpipe.sequential import ConversionError, from_stages, to_sequential
from torchgpipe.sequential.effects import ids_within

# --- differences that it finds
# -------------------------------------------------------------------------------------------------


def test_a_model_that_is_another_one_in_evaluation():
    """One example is a model that merges weights."""

    class Merged(Model):
        scale = 1

        def train(self, mode=True):
            self.scale = 1 if mode else 2
            return super().train(mode)

    model = Merged(lambda m, x: x * m.scale)
    with pytest.raises(ConversionError, match='other numbers .* in evaluation.*: output by'):
        to_sequential(model, torch.rand(4, 6))
    with pytest.raises(ConversionError, match='other numbers .* in training: output by'):
        to_sequential(model.eval(), torch.rand(4, 6))


def test_a_gradient_that_is_lost():
    """Also where the conversion is called without grad mode."""
    for grad in [True, False]:
        model = Model(lambda m, x: x * m.table)
        stages = [model.a, lambda m, x: m.b(x * m.table.detach())]
        with pytest.raises(ConversionError, match='in training: gradient of table by inf'):
            with torch.set_grad_enabled(grad):
                from_stages(model, stages, torch.rand(4, 6))


def test_a_gradient_that_the_model_has_not():
    model = Model(lambda m, x: x * m.table.detach())
    stages = [model.a, lambda m, x: m.b(x * m.table)]
    with pytest.raises(ConversionError, match='in training: gradient of table by inf'):
        from_stages(model, stages, torch.rand(4, 6))


def test_the_first_eight_differences_are_named():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    with pytest.raises(
        ConversionError,
        match=r'output by [^,]*(, gradient of [^,]*){7}, and '
        r'3 others\.',
    ):
        from_stages(model, [*model, lambda m, x: 2 * x], torch.rand(4, 6))


def test_a_way_that_goes_by_random_numbers():
    """It is not said that the size of micro-batches is to blame."""
    for draw in [
        lambda: torch.rand(1000).ge(0.5).nonzero(),
        lambda: torch.ones(random.randrange(1000)),
    ]:

        class Drawn(nn.Module):
            def forward(self):
                return draw()

        def function(m, x):
            for _ in range(m.drawn().shape[0]):
                x = x + 1e-3
            return x

        model = Model(function)
        model.drawn = Drawn()
        torch.manual_seed(1)
        random.seed(1)
        with pytest.raises(ValueError, match='^the program of a converted model goes the way'):
            to_sequential(model, torch.rand(4, 6), leaves=[Drawn])


def test_a_way_that_goes_by_a_weight():
    """Which is checked in each run, like all else that a program goes by."""
    model = Model(lambda m, x: x + 1 if m.table.dtype == torch.float64 else x)
    layers = to_sequential(model, torch.rand(4, 6))
    with pytest.raises(ValueError, match=r'table.dtype == torch.float64 was False; it is True'):
        layers.double()(torch.rand(4, 6).double())


def test_one_sample_alone():
    layers, x = to_sequential(Model(lambda m, x: x * 2), torch.rand(1, 6)), torch.rand(4, 6)
    assert layers(x).shape == (4, 6)


def test_a_gradient_that_is_lost_where_a_half_is_nothing_but_padding():
    """The loss of that is no number, nor are its gradients: then all of the sample is compared."""

    def loss(m, x, labels):
        return nn.functional.cross_entropy(m.b(x), labels)

    model = Model(lambda m, x: x)
    model.forward = lambda x, labels: loss(model, model.a(x) * model.table, labels)
    sample = Arguments(torch.rand(4, 6), torch.tensor([-100, -100, 1, 2]))
    with pytest.raises(ConversionError, match='the model in training: gradient of table by inf'):
        from_stages(
            model,
            [
                lambda m, x, labels: (m.a(x), labels),
                lambda m, given: loss(m, given[0] * m.table.detach(), given[1]),
            ],
            sample,
        )


def test_an_error_of_the_model_in_training_goes_by_no_size():
    model = Model(lambda m, x: x.sigmoid().mul_(2))  # The sigmoid needs it for its gradient.
    with pytest.raises(RuntimeError, match='^one of the variables needed for gradient'):
        to_sequential(model, torch.rand(4, 6))


def test_how_often_the_model_runs():
    """In training for a micro-batch, and in evaluation for all of the sample, and for halves."""
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append((len(x), self.training, torch.is_grad_enabled()))
            return super().forward(x)

    to_sequential(nn.Sequential(Seen(6, 6), nn.Linear(6, 6)), torch.rand(8, 6))
    assert seen[:2] == [(8, True, False)] * 2  # before it is recorded, and then
    assert seen[2:] == [(4, True, True)] * 2 + [(8, False, False)] * 2 + [(4, False, False)] * 2


# --- results that are no difference
# -------------------------------------------------------------------------------------------------


def test_rounding_of_a_gradient_that_is_zero():
    """An example is the gradient of a bias before a normalization."""

    def centred(m, x):
        y = x + m.table
        return y - y.mean(0) if m.training else y

    def centred_otherwise(m, x):
        y = x + m.table
        return m.b(y - y.flip(0).sum(0) / len(y) if m.training else y)

    model = Model(centred)
    torch.manual_seed(0)
    layers = from_stages(model, [model.a, centred_otherwise], torch.rand(7, 6))
    assert len(layers) == 2


def test_parameters_that_do_not_learn():
    model = Model(lambda m, x: x * 2)
    model.a.requires_grad_(False)
    assert len(to_sequential(model, torch.rand(4, 6))) == 2
    model.requires_grad_(False)
    x = torch.rand(4, 6, requires_grad=True)
    assert len(to_sequential(model, x)) == 2 and x.grad is None


def test_names_in_another_order():
    """If a tensor has two names, the layer has it by the second one first."""
    for kind in [nn.Parameter, nn.Buffer]:

        class Inner(nn.Module):
            def __init__(self, shared):
                super().__init__()
                self.own, self.shared = nn.Parameter(torch.rand(6)), shared

            def forward(self, x):
                return x * self.own + self.shared

        shared = kind(torch.rand(6))
        model = Model(lambda m, x: m.second(x))
        model.first, model.second = Inner(shared), Inner(shared)
        layers = to_sequential(model, torch.rand(4, 6))
        assert [*layers[0].state_dict()].index('second.own') < [*layers[0].state_dict()].index(
            'first.shared'
        ), kind


def test_a_model_on_no_device():
    """It may have nothing but buffers."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Buffer(torch.ones(6))

        def forward(self, x):
            return x * self.scale

    with torch.device('meta'):
        assert len(to_sequential(Scaled(), torch.rand(4, 6))) == 1


def made_in_inference_mode(makes_model):
    """Make a model with each kind of tensor that it may have, and a sample."""
    with torch.inference_mode(makes_model):
        model = Model(lambda m, x: m.norm(x * m.table + m.shift) + m.plain)
        model.norm, model.plain = nn.BatchNorm1d(6), torch.ones(6)
        model.shift = nn.Buffer(torch.rand(6))
    return model


def test_inference_mode():
    """In v0.8.0, it failed: tensors made in that mode were changed and saved for backward."""
    for by_hand in [False, True]:
        for makes_model, converts in [(True, True), (True, False), (False, True)]:
            model = made_in_inference_mode(makes_model)
            with torch.inference_mode(converts):
                x = torch.rand(4, 6)
                if by_hand:
                    layers = from_stages(
                        model,
                        [model.a, lambda m, x: m.b(m.norm(x * m.table + m.shift) + m.plain)],
                        x,
                    )
                else:
                    layers = to_sequential(model, x)
            with torch.inference_mode():
                assert torch.equal(layers.eval()(x), model.eval()(x))
            if not makes_model:
                layers(torch.rand(4, 6)).sum().backward()
                assert model.table.grad is not None, (by_hand, makes_model, converts)


def test_other_numbers_in_inference_mode():
    for makes_model in [False, True]:
        model = made_in_inference_mode(makes_model)
        with (
            torch.inference_mode(),
            pytest.raises(ConversionError, match='in training: output by'),
        ):
            from_stages(model, [model.a, model.b], torch.rand(4, 6))


# --- unchanged state
# -------------------------------------------------------------------------------------------------


def test_a_sample_that_the_model_changes():
    class Changing(nn.Module):
        def forward(self, x):
            assert not x.requires_grad
            return x.mul_(2)

    for wide in (6, 5):  # The other one is an error of the model's.
        model = nn.Sequential(Changing(), nn.Linear(6, 6))
        x = torch.rand(4, wide)
        kept = x.clone()
        if wide == 6:
            to_sequential(model, x)
            from_stages(model, [*model], x)
            to_sequential(model, x.requires_grad_())
            from_stages(model, [*model], x)
        else:
            with pytest.raises(RuntimeError, match='mat1 and mat2'):
                to_sequential(model, x)
        assert torch.equal(x, kept)


def test_a_model_that_raises_an_error():
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match='mat1 and mat2'):
        to_sequential(model, torch.rand(4, 5))
    assert model[0].num_batches_tracked == 0


def test_weights_are_not_copied():
    class Uncopied(nn.Parameter):
        def __deepcopy__(self, memo):
            raise AssertionError('there may be memory for one of it')

    model = Model(lambda m, x: x * m.table)
    model.table = Uncopied(torch.rand(6))
    layers = to_sequential(model, torch.rand(4, 6))
    assert layers[0].table is model.table
    layers = from_stages(model, [model.a, lambda m, x: m.b(x * m.table)], torch.rand(4, 6))
    assert layers[1].table is model.table


def test_random_numbers_of_python_after_a_leaf_that_draws():
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * random.random()

    state = random.getstate()
    to_sequential(nn.Sequential(Drawing(6, 6), Drawing(6, 6)), torch.ones(4, 6))
    assert random.getstate() == state


def test_the_mode_of_the_model_covers_all_modules():
    for training in [True, False]:
        model = Model(lambda m, x: x * 2).train(training)
        for layers in (
            to_sequential(model, torch.rand(4, 6)),
            from_stages(model, [model.a, lambda m, x: m.b(x * 2)], torch.rand(4, 6)),
        ):
            assert all(module.training == training for module in layers.modules())


def test_grad_mode_is_on_in_a_recording():
    model = Model(lambda m, x: x * 2 if torch.is_grad_enabled() else x)
    x = torch.rand(4, 6)
    with torch.no_grad():
        layers = to_sequential(model, x, check_sample=False)
    assert torch.equal(layers(x), model(x))


# --- contents of an object
# -------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, held):
        self.held = held


def test_a_change_within_an_object_is_seen():
    for make, change in [
        (lambda: ([1],), lambda x: x[0].append(2)),
        (lambda: {1}, lambda x: x.add(2)),
        (lambda: [Holder([])], lambda x: x[0].held.append(1)),
        (lambda: {'a': 1}, lambda x: x.update({'b': x.pop('a')})),
        (lambda: Holder(1), lambda x: setattr(x, 'held', 2)),
    ]:
        thing = make()
        before = ids_within(thing)
        assert ids_within(thing) == before, (make, change)
        change(thing)
        assert ids_within(thing) != before, (make, change)


def test_an_object_that_holds_itself():
    thing = Holder([])
    thing.held.append(thing)
    assert ids_within(thing)[0] == id(thing)
