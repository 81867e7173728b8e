"""Cases of a test that run one after the other in it, as they share their set-up and take no time.

An item of pytest has a seed, a look at its threads, a timeout and a report: some milliseconds.
"""

import functools
import inspect

from torchgpipe.base.errors import add_note


def cases(names, values):
    """Run a test for each of some values; a failure says for which one.

    Args:
        names: The arguments, as ``pytest.mark.parametrize`` has them: ``'x, y'``.
        values: The value of each case, or a tuple of them.
    """
    names = names.replace(' ', '').split(',')
    chosen = [dict(zip(names, value if len(names) > 1 else [value])) for value in values]
    assert chosen

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            for case in chosen:
                try:
                    test(**fixtures, **case)
                except BaseException as error:
                    add_note(error, f'the case: {case}')
                    raise

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(
            parameters=[
                parameter for name, parameter in signature.parameters.items() if name not in names
            ]
        )
        del run.__wrapped__
        return run

    return decorate
