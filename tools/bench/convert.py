"""Measure the conversion of a Llama-style model: speed beside a plain copy of the same bytes, and peak memory.

    python tools/bench/convert.py --folder /scratch/convert
    python tools/bench/convert.py --folder /scratch/convert --num-layers 4 --max-shard-size 500MB

The default is a model of 7B parameters, as Llama 2: 13.5 GB, up to three copies of which are on disk at a time. A
random bfloat16 model is written as a Hugging Face folder, copied file by file, converted to a checkpoint, and converted
back. Every output is synced to disk within the time. Peak memory is the largest resident set of a process, that of
Python and torch (about 0.3 GB) included; the bound is 1.2 x (largest tensor + one output file).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.extensions.conversion.convert import parse_bytes
from megatron.extensions.hugging_face.folder import index_of, plan_shards
from megatron.extensions.hugging_face.read_config import config_from_hf
from megatron.extensions.hugging_face.safetensors_file import SafetensorsWriter, TensorSpec
from megatron.extensions.hugging_face.weights import placements

TOOL = Path(__file__).resolve().parents[1] / "convert_checkpoint.py"
BLOCK = 1 << 24


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the copies; what they leave is deleted")
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--ffn-hidden-size", type=int, default=11008)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--max-shard-size", default="4GB")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True)
    source, copied, ours, theirs = (args.folder / name for name in ("source", "copy", "ours", "theirs"))
    try:
        largest, shard = write_model(source, args)
        total = sum(path.stat().st_size for path in source.iterdir())
        bound = 1.2 * (largest + shard) / 1e9
        print(f"model: {total / 1e9:.2f} GB, largest tensor {largest / 1e9:.3f} GB, largest file {shard / 1e9:.2f} GB")
        report("plain copy, synced", total, *timed(lambda: copy(source, copied)))
        shutil.rmtree(copied)
        for name, folder, output in (
            ("Hugging Face to checkpoint", source, ours),
            ("checkpoint to Hugging Face", ours, theirs),
        ):
            seconds, peak = timed(lambda folder=folder, output=output: convert(folder, output, args))
            report(name, total, seconds, peak, bound)
        same = all(path.read_bytes() == (theirs / path.name).read_bytes() for path in source.glob("*.safetensors"))
        print(f"files after the way there and back: {'equal, byte for byte' if same else 'DIFFERENT'}")
        return 0 if same else 1
    finally:
        shutil.rmtree(args.folder)


def write_model(folder: Path, args: argparse.Namespace) -> tuple[int, int]:
    """Writes the random model; returns the bytes of its largest tensor and of its largest file."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_attention_heads": args.hidden_size // 128,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = config_from_hf(config)
    specs: dict[str, TensorSpec] = {}
    for each in placements(model, "llama"):
        parts = each.layout.theirs(model, torch.empty(each.meta.global_shape, device="meta"))
        specs |= {n: TensorSpec(tuple(part.shape), torch.bfloat16) for n, part in zip(each.theirs, parts, strict=True)}
    shards = plan_shards(specs, parse_bytes(args.max_shard_size))
    for file, shard in shards.items():
        with SafetensorsWriter(folder / file, shard) as writer:
            for name, spec in shard.items():
                writer.add(name, torch.randn(spec.shape, dtype=torch.bfloat16))
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(shards)))
    return max(spec.nbytes for spec in specs.values()), max((folder / file).stat().st_size for file in shards)


def copy(source: Path, target: Path) -> int:
    """Copies a folder in blocks, and syncs each file."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb", buffering=0) as reading, (target / path.name).open("wb", buffering=0) as writing:
            while block := reading.read(BLOCK):
                writing.write(block)
            os.fsync(writing.fileno())
    return 0


def convert(folder: Path, output: Path, args: argparse.Namespace) -> int:
    """Runs the command; returns the peak memory of its largest process in bytes."""
    command = [
        sys.executable,
        str(TOOL),
        "--input",
        str(folder),
        "--output",
        str(output),
    ]
    command += ["--workers", str(args.workers), "--max-shard-size", args.max_shard_size]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return usage.ru_maxrss * 1024


def timed(run: Callable[[], int]) -> tuple[float, int]:
    """(seconds, result)"""
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def report(what: str, nbytes: int, seconds: float, peak: int, bound: float = 0.0) -> None:
    line = f"{what:30}  {seconds:7.1f} s  {nbytes / seconds / 1e6:7.0f} MB/s"
    print(line + (f"  peak {peak / 1e9:.2f} GB, bound {bound:.2f} GB" if peak else ""), flush=True)


if __name__ == "__main__":
    sys.exit(main())
