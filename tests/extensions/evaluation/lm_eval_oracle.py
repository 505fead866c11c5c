"""The six tasks of tests/fixtures in the loop, against lm-evaluation-harness on the exported Hugging Face model.

    python -m tests.extensions.evaluation.lm_eval_oracle

where lm_eval is: pip install .[lm-eval] transformers accelerate; with `--lm-eval PYTHON` it is run with the interpreter
of another environment, which has it.

Trains a small model on text like the tasks', evaluates it in the loop at TP 2 PP 2 and in one process, exports it, and
runs the harness on the export, and on the checkpoint itself by its model "megatron", in one process and at TP 2 PP 2.
Counts of right answers and generated texts must be equal, and log-likelihoods within rounding. Exits with 0 and the
reason if lm_eval is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.corpus import byte_level

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "tests" / "fixtures" / "eval_tasks"
NAMES = ("colours", "last_words", "pronouns", "sounds", "stories", "sums")

MODEL = (
    "--cpu --fp32 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--seq-length 128 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8 --global-batch-size 16 "
    "--micro-batch-size 4 --lr 3e-3 --min-lr 3e-4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 "
    "--tokenizer-type HuggingFaceTokenizer "
)

HARNESS = """
import json, logging, os, sys
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": sys.argv[4], "TOKENIZERS_PARALLELISM": "false"}
if sys.argv[5] == "megatron":
    import megatron.lm_eval_model.model
import lm_eval
from lm_eval.tasks import TaskManager
logging.disable(logging.WARNING)
manager = TaskManager(include_path=".", include_defaults=False)
found = lm_eval.simple_evaluate(
    model=sys.argv[5], model_args=sys.argv[1], tasks=sys.argv[2].split(), task_manager=manager, batch_size=4,
    device="cpu", log_samples=True, bootstrap_iters=2000, verbosity="ERROR",
)
if found is None:  # not the first rank
    sys.exit()
samples = {
    task: [
        {
            "document": each["doc_id"],
            "filter": each["filter"],
            "responses": each["resps"],
            "filtered": each["filtered_resps"],
        }
        for each in of_task
    ]
    for task, of_task in found["samples"].items()
}
json.dump({"results": found["results"], "samples": samples}, open(sys.argv[3], "w"), default=str)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default=sys.executable, help="interpreter that has lm_eval; default: this one")
    parser.add_argument("--iterations", type=int, default=150, help="of training (default: 150)")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    args = parser.parse_args(argv)
    imports = "import lm_eval, transformers, accelerate"
    known = subprocess.run([args.lm_eval, "-c", imports], capture_output=True, text=True)
    if known.returncode:
        print(f"skipped: {known.stderr.strip().splitlines()[-1]}; pip install .[lm-eval] transformers accelerate")
        return 0
    with tempfile.TemporaryDirectory(prefix="lm-eval-oracle-") as name:
        return compare(args.folder or Path(name), args.lm_eval, args.iterations)


def compare(folder: Path, python: str, iterations: int) -> int:
    """Trains, evaluates, exports and compares. Returns 1 if anything differs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, text, save, hf = (folder / name for name in ("tokenizer", "text.jsonl", "save", "hf"))
    write_text(text)
    train_tokenizer(tokenizer, text)
    run = f"{MODEL} --tokenizer-model {tokenizer} --data-path {text} --train-iters {iterations} --save {save} "
    pretrain(1, run + f"--split 100,0,0 --data-cache-path {folder / 'cache'}", folder)
    tasks = f"--eval-tasks {TASKS} --skip-train --load {save} --mock-data "
    base = f"{MODEL} --tokenizer-model {tokenizer} --train-iters {iterations} {tasks}"
    pretrain(1, base + f"--save {folder / 'one'} --eval-tasks-samples {folder / 'one'}", folder)
    layout = "--tp 2 --pp 2 --sequence-parallel"
    pretrain(4, base + f"{layout} --save {folder / 'four'} --eval-tasks-samples {folder / 'four'}", folder)
    convert = [sys.executable, "tools/convert_checkpoint.py", "--input", save, "--output", hf, "--dtype", "float32"]
    checked([*map(str, convert)], ROOT)
    harness = run_harness(python, folder / "hf.json", "hf", f"pretrained={hf},dtype=float32,max_length=128")
    ours = f"checkpoint={save}"
    classes = {
        "megatron": run_harness(python, folder / "class.json", "megatron", ours),
        "megatron 2x2": run_harness(python, folder / "class4.json", "megatron", f"{ours},tp=2,pp=2", ranks=4),
    }
    sides = {"one process": own(folder / "one"), "TP 2 PP 2": own(folder / "four")}
    differ = [report(name, scores, documents, harness) for name, (scores, documents) in sides.items()]
    differ += [class_differs(name, found, harness) for name, found in classes.items()]
    return int(any(differ))


def run_harness(python: str, out: Path, model: str, options: str, ranks: int = 1) -> Any:
    """Scores and documents of lm_eval with one of its models."""
    script = out.with_suffix(".py")
    script.write_text(HARNESS)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [options, " ".join(NAMES), str(out), str(out.parent / "datasets"), model]
    checked([python, *launch, str(script), *words], TASKS, PYTHONPATH=str(ROOT))
    return json.loads(out.read_text())


def write_text(path: Path) -> None:
    """Sentences of the tasks' kind, so that some answers are right."""
    rows = {name: [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()] for name in NAMES}
    told = [f"{row['animal']} {row['choices'][row['label']]}" for row in rows["sounds"][:8]]
    told += [f"{row['thing']} is {row['colour']}" for row in rows["colours"][:6]]
    told += [row["text"] for row in rows["last_words"][:8]] + [row["page"] for row in rows["stories"][:2]]
    told += [f"{a} + {b} = {a + b}\n" for a in range(7) for b in range(7)]
    told += [row["sentence"] for row in rows["pronouns"]]
    path.write_text("".join(json.dumps({"text": "\n\n".join(told[k:] + told[:k])}) + "\n" for k in range(len(told))))


def train_tokenizer(folder: Path, text: Path) -> None:
    """A byte-level BPE tokenizer of 400 tokens."""
    folder.mkdir(exist_ok=True)
    first = json.loads(text.read_text().splitlines()[0])["text"]
    bpe = byte_level(first.split("\n"), ["<|endoftext|>"], 400)
    bpe.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def pretrain(ranks: int, flags: str, folder: Path) -> None:
    words = ["--standalone", f"--nproc-per-node={ranks}", "pretrain_gpt.py", *shlex.split(flags)]
    checked(
        [sys.executable, "-m", "torch.distributed.run", *words] if ranks > 1 else [sys.executable, *words[2:]], ROOT
    )


def checked(command: Sequence[str], cwd: Path, **environ: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)[:300]}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def own(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(record, documents) of an evaluation in the loop."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (documents,) = folder.glob("iteration_*.jsonl")
    return records[-1], [json.loads(line) for line in documents.read_text().splitlines()]


def report(name: str, scores: Mapping[str, Any], documents: Sequence[Mapping[str, Any]], harness: Any) -> bool:
    """Prints both sides' scores and the largest difference of a log-likelihood. Returns whether they differ."""
    differ = False
    for task in NAMES:
        for key, value in harness["results"][task].items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            end = f",{filter_name}" if filter_name != "none" else ""
            mine, error = scores[f"eval/{task}/{metric}{end}"], scores.get(f"eval/{task}/{metric}_stderr{end}")
            theirs = harness["results"][task].get(f"{metric}_stderr,{filter_name}")
            equal = abs(mine - value) <= 1e-4 * abs(value) if "per" in metric else mine == value
            differ |= not equal
            errors = f"{error} / {theirs}" if error is not None else "-"
            print(f"{name:12} {task:10} {key:28} {mine:.6f} / {value:.6f} {'' if equal else 'DIFFERS'} stderr {errors}")
    return differ | documents_differ(name, documents, harness["samples"])


def documents_differ(name: str, documents: Sequence[Mapping[str, Any]], samples: Any) -> bool:
    largest, greedy, texts, compared = 0.0, 0, 0, 0
    for mine in documents:
        key = mine["document"], mine["filter"]
        (theirs,) = (each for each in samples[mine["task"]] if (each["document"], each["filter"]) == key)
        if "generated" in mine:
            texts += mine["generated"] != theirs["responses"][0][0] or mine["filtered"] != theirs["filtered"][0]
            continue
        for number, (log, response) in enumerate(zip(mine["log_likelihoods"], theirs["responses"], strict=True)):
            their_log, their_greedy = response[0] if isinstance(response[0], list) else (response[0], None)
            largest = max(largest, abs(log - float(their_log)) / max(1.0, abs(log)))
            greedy += their_greedy is not None and mine["is_greedy"][number] != (str(their_greedy) == "True")
            compared += 1
    print(
        f"{name:12} {compared} log-likelihoods: largest relative difference {largest:.1e}; "
        f"greedy flags that differ: {greedy}; generated texts that differ: {texts}"
    )
    return largest > 1e-4 or greedy > 0 or texts > 0


def class_differs(name: str, found: Any, harness: Any) -> bool:
    """Prints how far the harness' samples with its model "megatron" are from those with the exported model."""
    largest, others, compared = 0.0, 0, 0
    for task in NAMES:
        for one, two in zip(found["samples"][task], harness["samples"][task], strict=True):
            for mine, theirs in zip(one["responses"], two["responses"], strict=True):
                pairs = zip(
                    mine[0] if isinstance(mine[0], list) else mine,
                    theirs[0] if isinstance(theirs[0], list) else theirs,
                    strict=True,
                )
                for a, b in pairs:
                    compared += 1
                    if isinstance(a, float) and isinstance(b, float):
                        largest = max(largest, abs(a - b) / max(1.0, abs(a)))
                    else:
                        others += str(a) != str(b)
    right = sum(
        value != harness["results"][task][key]
        for task in NAMES
        for key, value in found["results"][task].items()
        if key.startswith(("acc", "exact_match")) and "stderr" not in key
    )
    print(
        f"{name:12} {compared} responses: largest relative difference {largest:.1e}; flags and texts that differ: "
        f"{others}; accuracies that differ: {right}"
    )
    return largest > 1e-4 or others > 0 or right > 0


if __name__ == "__main__":
    sys.exit(main())
