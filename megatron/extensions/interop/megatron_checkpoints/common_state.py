"""Reader of the non-tensor content of Megatron-LM's checkpoints. The non-tensor content is stored in pickle files. The
reader accepts only plain data from these files."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, UnionType

import torch

from megatron.core.dist_checkpointing.pickle_errors import why_refused
from megatron.core.dist_checkpointing.torch_file import load_torch_file
from megatron.extensions.interop.megatron_checkpoints.megatron_args import DATA


class _Plain:
    """Placeholder for a Megatron-LM class in a pickle file. Unpickled instances keep their attributes but have no
    methods."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


HARMLESS = tuple((module, name) for module, names in DATA["unpickled"].items() for name in names.split())
"""Pairs (module, class name) of classes whose instances occur in Megatron-LM's saved arguments. Instances are loaded
without importing these classes."""


def load_common(path: Path) -> dict[str, object]:
    """Return the dict in a pickle file. The file is read with `load_pickle`."""
    found = load_pickle(path, dict)
    assert isinstance(found, dict)
    return found


def load_pickle(path: Path, kind: type | UnionType) -> object:
    """Safely read a file that torch.save wrote, even from an untrusted source. The file is loaded with
    `weights_only=True`, and only classes in a list of harmless classes are allowed.

    Raises ValueError with a one-line message if the file is missing or damaged, if it refers to a class or function
    that is not allowed, or if its content is not an instance of `kind`.
    """
    import numpy

    names: list[object] = [argparse.Namespace, (torch.dtype, "torch.dtype"), *_numpy_names(numpy), Path, type(path)]
    names += [(type(name, (_Plain,), {}), f"{module}.{name}") for module, name in HARMLESS]
    names += [(_signal, "signal.Signals")]
    try:
        found = load_torch_file(path, names)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is refused: {why_refused(error)}") from None
    except (OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{path} contains a {type(found).__name__} instead of a {getattr(kind, '__name__', kind)}")
    return found


def _numpy_names(numpy: ModuleType) -> list[object]:
    """Return the numpy types and functions that occur in pickled arguments and in pickled states of random number
    generators."""
    try:
        from numpy._core import multiarray
    except ImportError:  # numpy 1
        from numpy.core import multiarray  # type: ignore[no-redef]
    kinds = [type(numpy.dtype(name)) for name in ("float64", "float32", "int64", "int32", "uint32", "uint8", "bool")]
    found: list[object] = [numpy.dtype, numpy.ndarray, *dict.fromkeys(kinds)]
    for name in ("scalar", "_reconstruct"):
        function = getattr(multiarray, name)
        found += [(function, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")]
    return found


def _signal(number: int) -> int:
    return int(number)


def args_of(common: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return the Megatron-LM arguments that a checkpoint contains. Raises ValueError if the checkpoint contains no
    arguments."""
    args = common.get("args")
    if not isinstance(args, argparse.Namespace):
        raise ValueError(
            f"{path} has no arguments (args) that describe the model; use a checkpoint of Megatron-LM's training"
        )
    return vars(args)


def update_count(optimizer: object) -> int | None:
    """Return the number of optimizer updates. All keys `step` and `common_step` in the nested optimizer state must have
    this value. Return None if there is no key `step` or `common_step`. Raises ValueError if two of these keys have
    different values."""
    counts: set[int] = set()

    def search(value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("step", "common_step") and isinstance(inner, int | float | torch.Tensor):
                    counts.add(int(inner))
                else:
                    search(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                search(inner)

    search(optimizer)
    if len(counts) > 1:
        raise ValueError(f"the optimizer's update counts {sorted(counts)} differ; all parameters must have the same")
    return counts.pop() if counts else None


def loss_scaler_of(optimizer: object, samples: int) -> dict[str, float]:
    """Return the state of the fp16 loss scaler, keyed by this program's names. The dict is empty if there is no loss
    scaler.

    Megatron-LM divides the loss by `samples`, the number of samples in a replica's batch, before the backward pass.
    This program divides the gradients after the backward pass, so its loss scale is Megatron-LM's loss scale divided by
    `samples`.
    """
    for each in optimizer.values() if isinstance(optimizer, dict) else optimizer if isinstance(optimizer, list) else ():
        if isinstance(each, dict) and (found := loss_scaler_of(each, samples)):
            return found
    state = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    if not isinstance(state, dict) or not isinstance(state.get("scale"), int | float | torch.Tensor):
        return {}
    found = {"scale": max(1.0, float(state["scale"]) / power_of_two(samples))}
    for ours, theirs in SCALER_COUNTERS.items():
        if isinstance(state.get(theirs), int):
            found[ours] = state[theirs]
    return found


def scaler_state(state: Mapping[str, float], samples: int) -> dict[str, object]:
    """Return the state of Megatron-LM's loss scaler. This function is the inverse of `loss_scaler_of`."""
    counters: dict[str, object] = {
        theirs: int(state[ours]) for ours, theirs in SCALER_COUNTERS.items() if ours in state
    }
    return {"scale": torch.tensor([state["scale"] * power_of_two(samples)]), **counters}


SCALER_COUNTERS = {"good_steps": "growth_tracker", "allowance": "hysteresis_tracker"}


def power_of_two(number: int) -> int:
    """Round a positive number up to a power of two."""
    return 1 << (number - 1).bit_length()
