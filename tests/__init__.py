"""The tests, one file per module of the package, and one per promise that spans modules."""

import torch

# torch.manual_seed records its stack for each kind of device that is missing. That takes some
# milliseconds a call, and the tests have many thousands of calls.
for _module in (torch.cuda, torch.mtia, torch.xpu):
    if not _module.is_available():
        _module.manual_seed_all = lambda seed: None
