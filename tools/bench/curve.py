"""Train a 124M-parameter model with this program and with transformers, and compare the loss curves. Both programs use
AdamW and the same initial weights, samples and learning rates.

    python tools/bench/curve.py --output runs/curve
    python tools/bench/curve.py --output runs/curve --draw
    python tools/bench/curve.py --output runs/curve-trial --cpu --tiny

For the first precision, the tool trains both programs step by step on the same batches. For all other precisions, it
trains only this program, starting from the same weights. Additional seeds for the initial weights show how much a curve
varies on the same samples. transformers computes with bf16 autocast and fp32 weights. The training text is --corpus, or
by default the Python source code on this machine. Each byte is a token.

The tool writes one curve per line to curves.jsonl during training, and the picture curves.png at the end. If matplotlib
is missing, run the tool again with --draw on a machine that has matplotlib. At the end, the tool prints the mean loss
over the last tenth of the steps. The exit code is 1 if one of the first losses differs from the loss of transformers by
more than rounding can explain.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fsync import whole_file
from tools.bench.side_by_side import bench_parser, own_run, positive

if TYPE_CHECKING:
    import torch

    from megatron.training.config.run_config import RunConfig
    from megatron.training.run import TrainingRun

FIRST = 5
"""Number of steps at the beginning of training whose losses are compared one by one."""

ROUNDING = {"bf16": 0.005, "fp8": 0.02}
"""Largest relative difference between first losses that rounding can explain, keyed by precision."""

PRECISIONS = {"bf16": "--bf16", "fp8": "--bf16 --fp8-format hybrid"}
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
DECAY, CLIP = 0.1, 1.0
OURS, THEIRS = "this program", "transformers"


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT-2 model and of the batches."""

    layers: int
    hidden: int
    heads: int
    length: int
    vocab: int
    micro_batch: int
    micro_batches: int
    steps: int

    @property
    def flags(self) -> str:
        """Training flags. The model flags come from the loaded folder."""
        return (
            f"--seq-length {self.length} --micro-batch-size {self.micro_batch} --eval-iters 0 --num-workers 0 "
            f"--global-batch-size {self.micro_batch * self.micro_batches} --attention-dropout 0 --hidden-dropout 0 "
            f"--lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --weight-decay {DECAY} --clip-grad {CLIP} "
            f"--adam-beta1 {ADAM['betas'][0]} --adam-beta2 {ADAM['betas'][1]} --adam-eps {ADAM['eps']}"
        )


FULL = Size(12, 768, 12, 1024, 50304, 8, 1, 2000)
TINY = Size(2, 64, 4, 64, 384, 2, 2, 30)


@dataclass
class Curve:
    """Losses of one training run."""

    program: str
    precision: str
    seed: int
    losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.program}, {self.precision}" + (f", seed {self.seed}" if self.seed else "")

    @property
    def last(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


class Peer:
    """Transformers model that is trained with torch's AdamW."""

    def __init__(self, size: Size, seed: int) -> None:
        import torch
        import transformers

        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            n_positions=size.length,
            vocab_size=size.vocab,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = transformers.GPT2LMHeadModel(config).train()

    def to(self, device: torch.device) -> None:
        import torch

        self.model.to(device)
        groups = [
            {"params": [p for p in self.model.parameters() if (p.ndim > 1) is decays], "weight_decay": DECAY * decays}
            for decays in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, **ADAM)

    def step(self, batches: Sequence[Any], lr: float) -> float:
        """Return the mean loss over the tokens of the batches."""
        import torch
        import torch.nn.functional as F

        total = 0.0
        for batch in batches:
            with torch.autocast(batch.tokens.device.type, torch.bfloat16):
                logits = self.model(input_ids=batch.tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten()) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


@contextmanager
def seen_batches(run: TrainingRun) -> Iterator[list[Any]]:
    """Record each batch that is passed to the model. The yielded list contains the recorded batches."""
    batches: list[Any] = []
    (stage,) = run.stages.values()
    hook = stage.register_forward_pre_hook(lambda _, args: batches.append(args[1]))
    yield batches
    hook.remove()


def trained(run: TrainingRun, steps: int, ours: Curve, peer: Peer | None, theirs: Curve) -> Iterator[None]:
    """Train with this program and, if `peer` is given, with transformers. Append the losses of each step to `ours` and
    `theirs`. The generator yields after each step."""
    from megatron.training.progress import Interval
    from megatron.training.train_step import train_step

    with seen_batches(run) as batches:
        for _ in range(steps):
            batches.clear()
            run.interval = Interval()
            train_step(run)
            total, count = run.interval.losses[-1].tolist()
            ours.losses.append(total / count)
            if peer is not None:
                theirs.losses.append(peer.step(batches, run.interval.learning_rate))
            yield


@contextmanager
def corpus_of(given: Path | None, megabytes: int) -> Iterator[Path]:
    """Yield the path of the given text. If `given` is None, write `megabytes` MB of Python source code from this
    machine to a temporary file."""
    if given is not None:
        yield given.resolve()
        return
    from tools.build_corpus import main as build_corpus

    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        path = Path(folder) / "corpus.jsonl"
        build_corpus(["--output", str(path), "--with-tests", "--max-mb", str(megabytes)])
        yield path


def config_of(size: Size, steps: int, flags: str) -> RunConfig:
    """Return the resolved configuration. Raises ValueError if the flags are invalid."""
    from megatron.training.config.arguments import command_line
    from megatron.training.config.validation import resolve_legal

    warm_up = f"--train-iters {steps} --lr-warmup-iters {steps // 20}"
    return resolve_legal(command_line(f"{size.flags} {warm_up} {flags}".split()).config, 1)


def write(curves: Sequence[Curve], path: Path) -> None:
    with whole_file(path) as whole:
        whole.write_text("".join(f"{json.dumps(asdict(curve))}\n" for curve in curves))


def train(size: Size, steps: int, path: Path, plan: Sequence[tuple[str, int]], flags: str) -> None:
    """Train this program's model for each (precision, seed) pair in `plan`, and write the loss curves to `path`. For
    the first pair, also train the model of transformers."""
    curves: list[Curve] = []
    for precision, seed in plan:
        peer = Peer(size, seed)
        with tempfile.TemporaryDirectory(prefix="weights-") as weights:
            peer.model.save_pretrained(weights)
            run = own_run(config_of(size, steps, f"{PRECISIONS[precision]} --load {weights} {flags}"))
        ours, theirs = Curve(OURS, precision, seed), Curve(THEIRS, "bf16", seed)
        both = not curves
        if both:
            peer.to(run.runtime.device)
        curves += [ours, theirs] if both else [ours]
        for step, _ in enumerate(trained(run, steps, ours, peer if both else None, theirs), 1):
            if step % max(1, steps // 20) == 0:
                beside = f", {THEIRS} {theirs.losses[-1]:.4f}" if both else ""
                print(f"{ours.name}: step {step}, loss {ours.losses[-1]:.4f}{beside}", flush=True)
                write(curves, path)
    write(curves, path)


def verdict(curves: Sequence[Curve]) -> tuple[list[str], bool]:
    """Return lines of text that compare the curves, and True if the first losses of both programs agree."""
    theirs = next(curve for curve in curves if curve.program == THEIRS)
    own = [curve for curve in curves if curve.program == OURS]
    alike, lines = True, []
    for curve in (curve for curve in own if curve.seed == theirs.seed):
        pairs = list(zip(curve.losses, theirs.losses, strict=False))
        first = max(abs(a / b - 1) for a, b in pairs[:FIRST])
        alike &= first <= ROUNDING[curve.precision]
        at_end = f"last tenth of {len(pairs)} steps: {curve.last:.4f}, {THEIRS} {theirs.last:.4f}"
        lines.append(
            f"{curve.precision}: first {FIRST} losses within {first:.2%} (at most {ROUNDING[curve.precision]:.1%}); "
            f"{at_end}, difference {curve.last - theirs.last:+.4f}"
        )
    ends = [curve.last for curve in own if curve.precision == own[0].precision]
    if len(ends) > 1:
        spread = f"from {min(ends):.4f} to {max(ends):.4f}, standard deviation {statistics.stdev(ends):.4f}"
        lines.append(f"{len(ends)} seeds in {own[0].precision}: {spread}")
    return lines, alike


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves. Each point is a mean over a hundredth of the steps."""
    from tools.pictures.drawing import Series, write_picture
    from tools.pictures.drawing import curves as figure_of

    series = []
    for curve in curves:
        width = max(1, len(curve.losses) // 100)
        ends = range(width, len(curve.losses) + 1, width)
        points = [(float(end), statistics.fmean(curve.losses[end - width : end])) for end in ends]
        series.append(Series(curve.name, points))
    figure = figure_of("loss", "nats per token", series, size=(8, 4.5))
    if figure is not None:
        write_picture(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the curves")
    add("--corpus", type=Path, help="text files, in the format of --data-path")
    add("--steps", type=positive, help="MB of text; default: 2,000, or 30 with --tiny")
    add("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add("--seeds", type=positive, default=3)
    add("--draw", action="store_true", help="only draw the curves in the folder's curves.jsonl")
    add("--cpu", action="store_true")
    add("--tiny", action="store_true", help="train two layers of 64 channels, for a trial")
    args = parser.parse_args(argv)
    path = args.output / "curves.jsonl"
    if not args.draw:
        args.output.mkdir(parents=True, exist_ok=True)
        size = TINY if args.tiny else FULL
        plan = [(each, 0) for each in args.precision] + [(args.precision[0], seed) for seed in range(1, args.seeds)]
        with corpus_of(args.corpus, 1 if args.tiny else 40) as corpus:
            data = f"--data-path {corpus} --tokenizer-type ByteTokenizer --split 100,0,0"
            train(size, args.steps or size.steps, path, plan, f"{data} --cpu" if args.cpu else data)
    curves = [Curve(**json.loads(line)) for line in path.read_text().splitlines()]
    lines, alike = verdict(curves)
    print("\n".join(lines))
    try:
        draw(curves, args.output / "curves.png")
    except ImportError as error:
        print(f"no picture: {error}; run this with --draw on a machine that has it")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
