# SPDX-License-Identifier: Apache-2.0
"""The live instances of a class."""

from __future__ import annotations

import copy

from ejkernel.ops.utils.weak_caches import Noted, living


class Thing(Noted):
    def __init__(self, name="", *, size=0):
        self.name = name


class Other(Noted):
    pass


def test_instances_are_listed_in_the_order_of_their_making():
    things = [Thing("a"), Thing("b", size=2), Thing()]
    assert [thing for thing in living(Thing) if thing in things] == things


def test_an_unreferenced_instance_is_removed(collect):
    thing = Thing("gone")
    del thing
    collect()
    assert "gone" not in [thing.name for thing in living(Thing)]


def test_instances_of_subclasses_count_and_those_of_other_classes_do_not():
    other, sub = Other(), type("Sub", (Thing,), {})()
    assert sub in living(Thing)
    assert other not in living(Thing)


def test_a_subclass_need_not_call_init():
    class Silent(Thing):
        def __init__(self):
            pass

    silent = Silent()
    assert silent in living(Thing)


def test_a_copy_is_a_separate_instance():
    thing = Thing("original")
    twin = copy.copy(thing)
    assert twin in living(Thing)
