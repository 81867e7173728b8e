"""Models of any form in a pipeline: the numbers and the names of the models themselves."""
import pytest
import torch

from tests.sequential.models import FULL, PARAMETERS


@pytest.mark.parametrize('name', PARAMETERS)
def test_they_are_the_models_of_the_literature(name):
    with torch.device('meta'):
        model, _ = FULL[name]()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
