"""Test that, with --manual-gc, garbage is collected only at the given interval."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron.training.config.run_config import TrainingConfig
from megatron.training.hooks import Task
from megatron.training.tasks import GarbageCollection
from tests.apart import python_apart


class Knot:
    """Object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    assert gc.isenabled()


def test_garbage_is_collected_at_the_interval(resources: ExitStack) -> None:
    old = weakref.ref(Knot())
    collection = GarbageCollection(TrainingConfig(manual_gc=True, manual_gc_interval=3), resources)
    assert old() is None and not gc.isenabled()
    new = weakref.ref(Knot())
    task = collection.task()
    assert [iteration for iteration in range(1, 8) if task.at(iteration, last=False)] == [3, 6]
    assert new() is not None
    task.run()
    assert new() is None


@pytest.mark.parametrize("wanted", [True, False])
def test_garbage_is_collected_around_evaluations(wanted: bool, resources: ExitStack) -> None:
    collection = GarbageCollection(TrainingConfig(manual_gc=True, manual_gc_eval=wanted), resources)
    before = weakref.ref(Knot())
    during: list[weakref.ref[Knot]] = []

    def evaluate() -> None:
        assert (before() is None) == wanted
        during.append(weakref.ref(Knot()))

    collection.around(Task("evaluation", 1, evaluate)).run()
    assert (during[0]() is None) == wanted
    assert not collection.task().at(1, last=True)


def test_without_the_flag_thresholds_trigger_collections(resources: ExitStack) -> None:
    collection = GarbageCollection(TrainingConfig(), resources)
    assert gc.isenabled()
    task = collection.task()
    assert not any(task.at(iteration, last=True) for iteration in range(1, 9))


@pytest.mark.parametrize("program", ["pretrain_gpt.main(['--help'])", "tools.common.run_tool(lambda: 0)"])
def test_a_program_exits_without_a_final_collection(program: str) -> None:
    """A final garbage collection at exit would take seconds, because torch is imported, and a preempted job has only
    half a minute."""
    last = "atexit.register(lambda: print('skipped:', gc.get_freeze_count() > 0))"
    shown = python_apart("-c", f"import atexit, gc; {last}; import pretrain_gpt, tools.common; {program}", code=0)
    assert shown.stdout.splitlines()[-1] == "skipped: True"
