"""Initialize a rank: device, process groups, random seeds and watchdog."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_state import ParallelState, build_groups
from megatron.core.pipeline_parallel.p2p import PipelineP2P
from megatron.core.tensor_parallel.layers import HARDWARE, Hardware
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.core.torch_private import set_group_timeout
from megatron.training.config.output_files import unwritable
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import BEGAN, Launch
from megatron.training.reliability.rank_store import Board, identity, meet
from megatron.training.reliability.visible_text import visible
from megatron.training.reliability.watchdog import Watchdog

_C_LIBRARY = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


class StartupPhases:
    """Timers that measure the wall time of each start-up phase."""

    def __init__(
        self, begin: Callable[[str], None] = lambda name: None, end: Callable[[str], None] = lambda name: None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._begin, self._end = begin, end

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._begin(name)
        try:
            yield
            self._end(name)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        parts = " | ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"start-up (s): {parts} | total {sum(self.seconds.values()):.2f}"


@dataclass(frozen=True)
class Runtime:
    """Runtime environment of a rank: launch, device, process groups and watchdog."""

    launch: Launch
    device: torch.device
    state: ParallelState
    phases: StartupPhases = field(default_factory=StartupPhases)
    watchdog: Watchdog = field(default_factory=Watchdog)
    hardware: Hardware = HARDWARE

    @property
    def is_main(self) -> bool:
        """True if this rank prints and writes metrics for the run."""
        return self.launch.rank == 0

    def say(self, message: str) -> None:
        """Print a line, on the main rank only."""
        if self.is_main:
            print(visible(message), flush=True)


def choose_device(config: ModelParallelConfig, launch: Launch) -> torch.device:
    """Return the GPU of this local rank, or the CPU if --cpu is set or no GPU is available."""
    if config.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.local_rank >= torch.cuda.device_count() and config.distributed_backend != "gloo":
        raise ValueError(
            f"local rank {launch.local_rank} has no GPU of its own: {torch.cuda.device_count()} present; "
            "start fewer processes per node, or pass --cpu (or --distributed-backend gloo to share GPUs)"
        )
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def check_compiler(config: ModelParallelConfig, device: torch.device) -> None:
    """Raise ValueError if --compile is in effect but the required compiler is missing."""
    if not config.compiles(device.type):
        return
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError("--compile, the default on GPUs, needs Triton: pip install triton, or pass --no-compile")
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"--compile needs a C++ compiler on CPU, but there is no {compiler}: install one, set CXX to one, or leave "
            "out --compile"
        )


def set_determinism(config: RunConfig) -> None:
    """Select deterministic kernels. Call this function before building the model, which chooses kernels."""
    if not config.training.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def connect(config: RunConfig, watchdog: Watchdog) -> None:
    """Connect this rank to the store of all ranks. Call this function before anything that can fail or hang. Raises
    ValueError if an environment variable is wrong."""
    launch = watchdog.launch
    launch.export(os.environ)
    watchdog.failures.checkpoints = config.checkpoint
    watchdog.outcome.begin(config.checkpoint.save, config.checkpoint.load, write=launch.rank == 0)
    watchdog.status.limit = f"--startup-timeout-minutes {config.parallel.startup_timeout_minutes:g}"
    limit = timedelta(minutes=config.parallel.startup_timeout_minutes)
    board = Board(meet(launch, limit, "board", identity(config)), launch)
    watchdog.connect(board)
    board.check_world_size()


def start_watchdog(config: RunConfig, watchdog: Watchdog) -> None:
    """Start the connected watchdog.

    Raises ValueError if an environment variable is wrong, or if a folder cannot be written. If `Watch.start` raises an
    exception, the exception propagates.
    """
    launch, training = watchdog.launch, config.training
    if launch.rank == 0 and (problems := list(unwritable(config))):
        raise ValueError("\n".join(map(str, problems)))
    # Deadlines use the monotonic clock, because the system time may be adjusted during a run.
    now, deadlines = time.monotonic(), {}
    if training.exit_signal_handler and watchdog.outcome.asked:
        deadlines["a signal arrived before the ranks were started"] = (0.0, "resume")
    if training.exit_duration_in_mins:
        until = float(os.environ.get(BEGAN, now)) + 60 * training.exit_duration_in_mins
        deadlines[f"--exit-duration-in-mins {training.exit_duration_in_mins}"] = (until, "stop")
    if end := os.environ.get("SLURM_JOB_END_TIME"):
        margin = training.exit_margin_in_mins
        if not end.isdigit():
            raise ValueError(f"SLURM_JOB_END_TIME={end}: must be in seconds since 1970, as SLURM sets it; or unset it")
        deadlines[f"the SLURM job ends in {margin} minutes"] = (now + int(end) - time.time() - 60 * margin, "resume")
    watchdog.start(training.exit_signal_handler, deadlines)


def keep_memory(device: torch.device) -> None:
    """Make glibc keep freed tensor memory when training on the CPU, unless the environment configures malloc.

    By default, glibc immediately returns each block above 32 MiB, such as the logits, to the system. In every step, the
    system would then map and clear the same pages again. This would take most of the step's system time, and even more
    with huge pages.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(_C_LIBRARY, "mallopt", None) if device.type == "cpu" and not configured else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def give_back_memory(device: torch.device) -> None:
    """Return free pages of the C heap to the system when training on the CPU, if the C library supports this.

    glibc keeps the freed memory of temporary tensors in its heap. gloo's threads allocate memory between these tensors.
    If free pages were not returned, the resident size would grow slowly for hundreds of steps, although no tensor is
    kept.
    """
    trim = getattr(_C_LIBRARY, "malloc_trim", None) if device.type == "cpu" else None
    if trim is not None:
        trim(0)


def local_runtime(config: RunConfig, rank: int, world_size: int) -> Runtime:
    """Create the CPU runtime of a rank that `run_world` has started, with process groups for the ranks of its world."""
    state = build_groups(config.parallel)
    return Runtime(Launch(rank, world_size, rank), torch.device("cpu"), state)


def initialize(config: RunConfig, launch: Launch, phases: StartupPhases, watchdog: Watchdog | None = None) -> Runtime:
    """Join the world and build the process groups. `config` must have been validated for `launch.world_size`.

    Raises ValueError if the requested device or backend is not available.
    """
    parallel, watchdog = config.parallel, watchdog or Watchdog(launch)
    if launch.local_rank:  # All ranks of a node have the same warnings, so only one rank prints them.
        logging.getLogger("megatron").setLevel(logging.ERROR)
    set_determinism(config)
    device = choose_device(parallel, launch)
    keep_memory(device)
    check_compiler(parallel, device)
    if (name := linear_format(parallel)) is not None:
        LINEAR_FORMATS[name].check(parallel, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The model does not use these generators: it derives random values from the seed and a position. Users' hooks may
    # use them.
    random.seed(config.training.seed)
    np.random.seed(config.training.seed % 2**32)
    torch.manual_seed(config.training.seed)
    if launch.world_size == 1:
        return Runtime(launch, device, ParallelState(), phases, watchdog)
    backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(minutes=parallel.startup_timeout_minutes)
    launch.export(os.environ)
    # NCCL's warning does not apply, because pipeline messages that must not wait for each other use separate groups.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if backend == "nccl" and (folder := config.checkpoint.save_folder) is not None:
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "stacks" / "nccl-rank-"))
    with phases("join the world"):
        dist.init_process_group(
            backend,
            store=meet(launch, timeout, "groups"),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    with phases("process groups"):
        state = build_groups(parallel, timeout)
        watchdog.status.state = state
    return Runtime(launch, device, state, phases, watchdog)


def limit_waits(runtime: Runtime, p2p: PipelineP2P, flag: str, minutes: float) -> None:
    """Set the timeout of collectives and messages to `minutes`. `flag` is the flag that set this value."""
    runtime.watchdog.status.limit = f"{flag} {minutes:g}"
    p2p.timeout = timedelta(minutes=minutes)
    groups = {axis.group for axis in (runtime.state.world, *runtime.state.axes.values()) if axis.group is not None}
    for group in groups:
        set_group_timeout(timedelta(minutes=minutes), group)  # gloo messages are not affected; they use p2p.timeout


def shut_down() -> None:
    """Destroy the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
