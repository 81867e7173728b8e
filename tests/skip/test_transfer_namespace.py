"""Namespaces: unlike each other, like their copies."""

import copy
import pickle

from torchgpipe.skip import Namespace


def test_two_namespaces_differ():
    one, other = Namespace(), Namespace()
    assert one != other and hash(one) != hash(other) and (one < other) != (other < one)


def test_copies_and_pickles_are_equal():
    namespace = Namespace()
    for clone in (
        copy.copy(namespace),
        copy.deepcopy(namespace),
        pickle.loads(pickle.dumps(namespace)),
    ):
        assert clone == namespace and clone is not namespace and hash(clone) == hash(namespace)


def test_none_is_the_default_namespace():
    assert isinstance(None, Namespace)
