"""Profiles of selected steps on selected ranks: torch profiler traces, nsys ranges, and GPU memory history."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile

from megatron.core.torch_private import dump_memory_history, profiler_options, record_memory_history
from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.training.config.flags import named_value
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, RunView
from megatron.training.reliability.lossy_output import told_if_unwritten
from megatron.training.step_parts import runs_passes_in_turns


class Profiler(Callback):
    """Callback that profiles the steps from --profile-step-start to --profile-step-end on the ranks in --profile-ranks.

    On CPUs, or if --use-pytorch-profiler is set, the callback writes a trace for Perfetto and Chrome. Otherwise, the
    callback starts and stops the capture of `nsys profile --capture-range=cudaProfilerApi`. Each operation and each
    pipeline action has an NVTX range.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options = config.options(DiagnosisConfig)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._profile: profile | None = None
        self._ranges: emit_nvtx | None = None
        self._recording = False

    def on_start(self, run: RunView) -> None:
        if self.options.record_memory_history and run.optimizer.ddp.device.type == "cuda":
            record_memory_history(self._write_memory)
            self._recording = True
        self._turn(run)

    def on_step_end(self, run: RunView) -> None:
        self._turn(run)

    def on_end(self, run: RunView) -> None:
        """If the run stops before --profile-step-end, end the profile and write the recorded memory allocations."""
        self._stop(run)
        self._write_memory()

    def _turn(self, run: RunView) -> None:
        iteration, options = run.progress.iteration, self.options
        if iteration == options.profile_step_start and options.profile and self.rank in options.profile_ranks:
            self._start(run)
        if iteration == options.profile_step_end:
            self._stop(run)
            self._write_memory()

    def _start(self, run: RunView) -> None:
        cuda, options = run.optimizer.ddp.device.type == "cuda", self.options
        if cuda and not options.use_pytorch_profiler:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
            self._ranges = emit_nvtx(record_shapes=options.record_shapes)
            self._ranges.__enter__()
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        # Interleaved passes run in a separate thread, so the profile must cover all threads.
        threads = profiler_options(all_threads=runs_passes_in_turns(self.config))
        self._profile = profile(
            activities=activities,
            record_shapes=options.pytorch_profiler_collect_shapes,
            with_stack=options.pytorch_profiler_collect_callstack,
            experimental_config=threads,
        )
        self._profile.start()

    def _stop(self, run: RunView) -> None:
        running, self._profile = self._profile, None
        ranges, self._ranges = self._ranges, None
        if running is not None:
            running.stop()
            path = output_folder(self.config, "profile") / f"rank-{self.rank}.json"
            with told_if_unwritten(f"profile of rank {self.rank}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                running.export_chrome_trace(str(path))
                run.say(f" profile of rank {self.rank}: {path}")
        if ranges is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
            ranges.__exit__(None, None, None)

    def _write_memory(self) -> None:
        """Write the recorded memory allocations to a file. The allocations are written only once: at the end of the
        profile, at the end of the run, or when memory runs out."""
        recording, self._recording = self._recording, False
        if recording:
            path = f"{self.options.memory_snapshot_path}.rank{self.rank}"
            with told_if_unwritten(f"memory snapshot {path}"):
                dump_memory_history(path)


def output_folder(config: RunConfig, name: str) -> Path:
    """Return the folder for profiles or traces. The folder is a subfolder of --tensorboard-dir. If --tensorboard-dir is
    not set, it is a subfolder of --save, or of the current folder if --save is not set either."""
    return Path(named_value(config, "tensorboard_dir") or config.checkpoint.save_folder or ".") / name
