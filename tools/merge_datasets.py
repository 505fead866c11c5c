"""Merge indexed datasets into one. The documents keep the order of the inputs.

    python tools/merge_datasets.py --input data/a_text_document data/b_text_document --output-prefix data/all

An input is the prefix of a dataset, or a folder. If an input is a folder, all datasets in it are merged, sorted by
name. Prefixes may be URLs, such as s3://bucket/a_text_document. Memory use does not depend on the size of the data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.datasets.indexed_dataset import IndexedDataset, strip_suffix
from megatron.core.dist_checkpointing.file_storage import located, resolved
from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder

from .common import dataset_at, refuse, refuse_output, run_tool, tool_parser


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes of the named datasets. Raises ValueError with a list of the inputs that are not datasets."""
    found, problems = [], []
    for value in inputs:
        folder = Path(value)
        if not folder.is_dir():
            found.append(strip_suffix(value))
            continue
        inside = sorted(str(path)[:-4] for path in folder.glob("*.idx"))
        if not inside:
            problems.append(f"--input {value}: the folder has no dataset (no .idx file)")
        found += inside
    twice = sorted({prefix for prefix in found if found.count(prefix) > 1})
    if twice:
        problems.append(f"--input: {', '.join(twice)} given more than once")
    refuse(problems)
    return found


def open_all(prefixes: Sequence[str]) -> list[IndexedDataset]:
    """Open every input. Raises ValueError with one line for each input that cannot be merged."""
    datasets, problems = [], []
    for prefix in prefixes:
        try:
            dataset = dataset_at(prefix)
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += [f"{prefix}: {problem}" for problem in dataset.verify()]
        datasets.append(dataset)
    kinds: dict[str, list[str]] = {}
    for dataset in datasets:
        kinds.setdefault(dataset.dtype.name, []).append(dataset.prefix)
    if len(kinds) > 1:
        shown = "; ".join(f"{kind}: {', '.join(members)}" for kind, members in kinds.items())
        problems.append(f"--input: token ids are stored in different types ({shown}); merge data of one tokenizer only")
    refuse(problems)
    return datasets


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, help="prefixes, or folders of datasets")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--overwrite", action="store_true", help="replace output files that exist")
    args = parser.parse_args(argv)
    output = strip_suffix(args.output_prefix)
    prefixes = find_prefixes(args.input)
    if resolved(located(output)) in [resolved(located(prefix)) for prefix in prefixes]:
        raise ValueError(f"--output-prefix {output} is one of the inputs; write elsewhere")
    refuse_output([located(output + ".bin"), located(output + ".idx")], args.overwrite)
    datasets = open_all(prefixes)
    with IndexedDatasetBuilder(output, datasets[0].dtype, described={}) as builder:
        for dataset in datasets:
            builder.add_dataset(dataset)
            print(f"{dataset.prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens")
    print(f"{output}: {builder.num_documents:,} documents, {builder.num_tokens:,} tokens")
    return 0


if __name__ == "__main__":
    run_tool(main)
