"""The tests, one file per module of the package, and one per promise that spans modules."""
import torch

# torch.manual_seed writes down its stack for each kind of device that is not there, in case that
# it comes: some milliseconds a call, of which the tests have many thousands.
for _module in (torch.cuda, torch.mtia, torch.xpu):
    if not _module.is_available():
        _module.manual_seed_all = lambda seed: None
