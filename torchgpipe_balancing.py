"""The name under which the balancer was distributed before torchgpipe 0.0.5."""

raise ImportError(
    'torchgpipe_balancing is part of torchgpipe now: import balance_by_time and '
    'balance_by_size from torchgpipe.balance'
)
