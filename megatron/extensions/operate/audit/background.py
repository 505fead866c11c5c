"""Audits by a background process (--audit-by layout and --audit-by precision). The process runs on the host of the
first rank, and recomputes audited steps while training continues.

Before an audited step, the ranks write the current weights and the samples of the step to the --save folder. After the
backward passes of the step, each rank computes random-sign sums of its shard of the reduced gradients (`sketch`). The
audit process computes the same sums from the recomputed gradients, and compares these sums with the sums that the ranks
computed. An audit is skipped if the audit process is still busy with the previous audit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.collectives import all_reduce_, gather_objects
from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.param_meta import ParamMeta
from megatron.extensions.observe.diagnosis.step_dump import CONFIG, write_samples
from megatron.extensions.operate.audit import recompute
from megatron.extensions.operate.audit.flags import AuditFlags
from megatron.extensions.operate.audit.outcome import Outcome
from megatron.extensions.operate.audit.recompute import JOB, PIECES, RESULT, Piece, Result, forget
from megatron.extensions.operate.audit.sketch import sums_of
from megatron.extensions.operate.audit.verdict import GRADIENT, LOSS, Finding
from megatron.training.config.arguments import save_config
from megatron.training.hooks import Callback, Log, Meter, StepView, Task
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun

LOOKS = 10
"""Number of times that a run looks for the result of an audit before the next audit begins."""

LONGEST_WAIT = 600.0
"""Maximum time in seconds that a finished run waits for the last audit."""

POLL = 0.05

CAUSES = {
    "layout": "a single process computes a different gradient with the same weights and samples",
    "precision": "the gradient in a wider number format differs by more than rounding explains",
}


class BackgroundAudit(Callback, Meter):
    """Callback that compares audited steps with their recomputation by a background process."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.run, own = run, self.config.options(AuditFlags)
        self.interval, self.means = own.audit_interval, own.audit_by
        rank, world = run.runtime.launch.rank, run.runtime.state.world
        self.outcome = Outcome(self.config, rank)
        save = self.config.checkpoint.save_folder
        assert save is not None, "the rules of --audit-by require --save"
        self.folder = save / "audit"
        self._step: Step | None = None
        self._sketches: list[list[list[float]]] = []
        self._sent: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._terms: dict[str, Tensor] = {}
        pieces = gather_objects((self._owned_pieces(rank), self._term_pieces(rank)), world)
        self._hosts = gather_objects(socket.gethostname(), world)
        if run.runtime.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            config = self.config
            given = tuple((field, value) for field, value in config.given if field != "vocab_size")
            save_config(replace(config, given=given), self.folder / CONFIG)
            owned, terms = ([piece for each in pieces for piece in each[kind]] for kind in (0, 1))
            (self.folder / PIECES).write_text(json.dumps({"owned": owned, "terms": terms}))
        gather_objects(None, world)
        return (self,)

    def _owned_pieces(self, rank: int) -> list[Piece]:
        """Return the parts of the reduced gradients that this rank owns."""
        coords = self.run.runtime.state.coords
        return [
            Piece(rank, piece.meta.name, *piece.meta.box(coords), piece.start, piece.stop)
            for bucket in self.run.ddp.buckets
            for piece in bucket.owned_pieces
        ]

    def _term_pieces(self, rank: int) -> list[tuple[int, Piece]]:
        """Describe the gradients to which only this rank of its data-parallel replica contributes, before gradients are
        summed over replicas. Return a pair (data-parallel rank, piece) for each parameter with a gradient of this
        kind."""
        state = self.run.runtime.state
        if state.dp.size == 1 or state.cp.size > 1:
            return []
        metas: list[ParamMeta] = [place.meta for bucket in self.run.ddp.buckets for place in bucket.layout.params]
        alone = [meta for meta in metas if not meta.partial_over and len(meta.shared_stages) < 2]
        boxes = ((meta, *meta.box(state.coords)) for meta in alone)
        return [(state.dp.rank, Piece(rank, meta.name, o, shape, 0, prod(shape))) for meta, o, shape in boxes]

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        return (
            Task("audit", None, self._begin, also=self._is_next, counts=True, before_step=True),
            Task("result of the audit", max(1, self.interval // LOOKS), self._look, counts=True, reads_result=False),
            Task("last audit", None, self._finish, at_finish=True),
        )

    def _is_next(self) -> bool:
        iteration = self.run.progress.iteration + 1
        skipped = iteration in (self.config.checks.iterations_to_skip or ())
        return iteration % self.interval == 0 and iteration <= self.run.train_iters and not skipped

    def _begin(self) -> None:
        """Write the weights and samples of the next step to disk, unless an audit is in progress."""
        self._look()
        if self._sent is not None:
            return
        run, state = self.run, self.run.runtime.state
        run.guard.settle()
        run.ddp.gather_params_()
        step = run.progress.next_step(run.batch_sizes)
        folder = self._snapshot(step.iteration)
        folder.mkdir(parents=True, exist_ok=True)
        boxes = self._boxes()
        problem = None
        try:
            if boxes:
                save_file(boxes, folder / f"weights-{run.runtime.launch.rank:05d}.safetensors")
            if state.tp.first and state.pp.first and state.cp.first:
                batches = run.data.train.next_step(step.first_sample, step.samples)
                problem = write_samples(batches, folder / f"samples-{state.dp.rank:05d}.npz")
        except OSError as error:
            problem = str(error)
        problems = [each for each in gather_objects(problem, state.world) if each]
        if problems:
            run.say(f" no audit of iteration {step.iteration}: {problems[0]}")
        else:
            self._step = step
            self._terms = {}
            for bucket in run.ddp.buckets:
                bucket.before_sync = self._note_terms

    def _note_terms(self, bucket: Bucket) -> None:
        """Compute random-sign sums of each gradient before the gradients are reduced over data-parallel replicas."""
        for place in bucket.layout.params:
            start = place.start - bucket.layout.start
            row = sums_of(bucket.grads[start : start + place.stop - place.start])
            before = self._terms.get(place.meta.name)
            self._terms[place.meta.name] = row if before is None else before + row

    def _snapshot(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:07d}"

    def _boxes(self) -> dict[str, Tensor]:
        """Return the weight shards that this rank writes to a snapshot: a folder with the weights and samples of one
        step. If several ranks hold the same shard, only the first of them writes it."""
        state = self.run.runtime.state
        found = {}
        for model in self.run.stages.values():
            for name, (param, meta) in model.named_metas().items():
                if self._is_first(meta):
                    offset, _ = meta.box(state.coords)
                    box = param.detach().to("cpu", copy=True).contiguous()
                    found[f"{name}@{','.join(map(str, offset))}"] = box
        return found

    def _is_first(self, meta: ParamMeta) -> bool:
        state = self.run.runtime.state
        return meta.is_first_replica(state.coords) and state.axis(meta.data_axis).first

    def gradients_ready(self, factor: Tensor) -> None:
        if self._step is None:
            return
        buckets = self.run.ddp.buckets
        grads = [bucket.owned_grad(piece) for bucket in buckets for piece in bucket.owned_pieces]
        for bucket in buckets:
            bucket.before_sync = None
        terms = [self._terms[piece.name] for _, piece in self._term_pieces(0)]
        self._sketches = [self._scaled(rows, factor) for rows in ([sums_of(grad) for grad in grads], terms)]

    def _scaled(self, rows: Sequence[Tensor], factor: Tensor) -> list[list[float]]:
        found: list[list[float]] = (torch.stack(list(rows)) * factor).tolist() if rows else []
        return found

    def after_update(self, step: StepView, result: StepResult) -> None:
        """Write the loss and the random-sign sums of the gradients to a file, and request an audit from the audit
        process."""
        if self._step is None:
            return
        run, world = self.run, self.run.runtime.state.world
        sketches = gather_objects(self._sketches, world)
        total, tokens = all_reduce_(step.loss_and_tokens.clone(), world).tolist()[:2]
        made, self._step = self._step, None
        self._sent = made.iteration
        if run.runtime.is_main:
            folder = self._snapshot(made.iteration)
            job = {
                "step": asdict(made),
                "means": self.means,
                "loss": total / max(tokens, 1.0),
                **{
                    key: [row for each in sketches for row in each[kind]] for kind, key in enumerate(("owned", "terms"))
                },
            }
            (folder / JOB).write_text(json.dumps(job))
            self._send(folder.name)

    def _send(self, name: str) -> None:
        if self._process is None or self._process.poll() is not None:
            paths = [path for path in sys.path if path]
            environ = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", recompute.__name__, str(self.folder)],
                env={key: value for key, value in os.environ.items() if key not in LAUNCHED} | environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()

    def _look(self) -> None:
        """Read the result of the audit in progress, if the audit process has written it. Collective."""
        if self._sent is None:
            return
        run, iteration = self.run, self._sent
        found: Result | None = None
        if run.runtime.is_main:
            with suppress(OSError, ValueError):
                found = Result.read(self._snapshot(iteration) / RESULT)
            if found is None and self._process is not None and self._process.poll() is not None:
                found = Result(0.0, 0.0, problem=f"the audit process ended with code {self._process.returncode}")
        there = torch.tensor(found is not None, device=run.runtime.device).long()
        if all_reduce_(there, run.runtime.state.world).item() == 0:
            return
        result = gather_objects(found, run.runtime.state.world)[0]
        assert result is not None
        self._sent = None
        if run.runtime.is_main and result.first is None:
            forget(self._snapshot(iteration))
        if result.problem:
            run.say(f" no audit of iteration {iteration}: {result.problem}")
        else:
            self.outcome.add(run, iteration, self._finding(result))

    def _finding(self, result: Result) -> Finding | None:
        cause = CAUSES[self.means]
        if result.first is not None:
            words = f"{result.where}: {cause}; allowed {result.allowed:.2g}"
            hosts = tuple(self._hosts[rank] for rank in result.ranks)
            return Finding(result.ranks, hosts, GRADIENT, result.first, result.relative, words)
        if result.loss > result.allowed_loss:
            words = f"the gradients agree, but the loss does not; allowed {result.allowed_loss:.2g}"
            dims = self.run.runtime.state.dims
            ranks = tuple(rank for rank in range(dims.world_size) if dims.coords(rank)["pp"] == dims.pp - 1)
            hosts = tuple(self._hosts[rank] for rank in ranks)
            return Finding(ranks, hosts, LOSS, "fraction of all tokens", result.loss, words)
        return None

    def _finish(self) -> None:
        """Wait for the last audit, for at most `LONGEST_WAIT` seconds."""
        for _ in range(round(LONGEST_WAIT / POLL)):
            self._look()
            if self._sent is None:
                break
            time.sleep(POLL)

    def on_end(self, run: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        return self.outcome.values()

    def take(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64, device=self.run.runtime.device)


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of the launcher that are removed from the environment of the audit process."""
