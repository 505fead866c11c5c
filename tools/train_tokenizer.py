"""Train a SentencePiece tokenizer on text files.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix data/tokenizer

The tool writes data/tokenizer.model, for --tokenizer-model, and data/tokenizer.vocab. Inputs are files, globs, folders
and URLs. The suffixes .jsonl, .json, .csv, .tsv, .parquet and .arrow determine the format; all other files are plain
text. Text formats may be compressed (.gz, .bz2, .xz, .zst). By default, the tokenizer is lossless: it does not
normalize text, and it encodes characters outside the vocabulary as bytes. If the trained tokenizer is lossy, the tool
prints which kinds of text it does not restore. The token that ends a document depends on --tokenizer-type:
SentencePieceTokenizer uses <EOD>, and Llama2Tokenizer uses --eos-token.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.fsync import whole_file
from megatron.extensions.data.text_data.formats import Reading, is_blank, read_chunks, texts_of
from megatron.extensions.data.text_data.inputs import TextFile, find_inputs

from .common import refuse_output, run_tool, tool_parser

CHUNK_BYTES = 1 << 20
# SentencePiece silently drops long sentences. Lines are therefore split into pieces of at most this many characters. A
# character has up to 4 bytes.
SENTENCE_CHARACTERS = 4096
# The number of threads is fixed, because the rounding of scores in unigram models depends on it.
THREADS = 8


def sentences(files: Sequence[TextFile], keys: Sequence[str], bad: list[str]) -> Iterator[str]:
    """Yield the lines of all documents, split into pieces that SentencePiece accepts. Descriptions of unreadable lines
    are appended to `bad`."""
    reading = Reading(tuple(keys), text_documents="line")
    for file in files:
        file = replace(file, format=file.format or "text")
        of_file = replace(reading, keys=("text",)) if file.format == "text" else reading
        for chunk in read_chunks([file], of_file, CHUNK_BYTES):
            for number, record in enumerate(chunk.records, chunk.first):
                if is_blank(record):
                    continue
                try:
                    texts = texts_of(record, chunk, of_file)
                    for text in texts:
                        text.encode()
                except ValueError as error:
                    why = f"not UTF-8 ({error.reason})" if isinstance(error, UnicodeEncodeError) else error
                    bad.append(f"{chunk.path}:{number}: {why}")
                    continue
                for line in (line for text in texts for line in text.splitlines()):
                    for start in range(0, len(line), SENTENCE_CHARACTERS):
                        yield line[start : start + SENTENCE_CHARACTERS].replace("\0", " ")


def train(args: argparse.Namespace, inputs: Sequence[TextFile]) -> tuple[bytes, list[str]]:
    """Train the tokenizer. Return the bytes of its model file, and a list of unreadable lines in the input."""
    import sentencepiece

    bad: list[str] = []
    model = io.BytesIO()
    options = {
        "model_writer": model,
        "vocab_size": args.vocab_size,
        "model_type": args.model_type,
        "character_coverage": args.character_coverage,
        "byte_fallback": args.byte_fallback,
        "normalization_rule_name": args.normalization_rule_name,
        "remove_extra_whitespaces": args.normalization_rule_name != "identity",
        "allow_whitespace_only_pieces": True,
        "split_digits": args.split_digits,
        "max_sentence_length": 4 * SENTENCE_CHARACTERS + 1,
        "input_sentence_size": args.max_sentences,
        "shuffle_input_sentence": True,
        "num_threads": THREADS,
        "unk_piece": args.unk_token,
        "bos_piece": args.bos_token,
        "eos_piece": args.eos_token,
        "pad_piece": args.pad_token,
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": 3,
        "control_symbols": [args.eod_token],
        "user_defined_symbols": args.user_defined_symbols,
        "minloglevel": 0 if args.verbose else 2,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences(inputs, args.json_keys, bad), **options)
    except (RuntimeError, OSError) as error:
        raise ValueError(explain(str(error), args, bad)) from None
    return model.getvalue(), bad


PROBES = {"line breaks": "a\n\nb", "spaces": "a  b", "characters outside its vocabulary": "a \ue000"}
"""Texts that a lossy tokenizer does not restore."""


def explain(message: str, args: argparse.Namespace, bad: Sequence[str]) -> str:
    """Extract the reason from an error message of SentencePiece, and append a remedy to it."""
    # The message begins with the source line and the failed condition, which are removed.
    reason = message.rsplit("] ", 1)[-1].strip() or message
    if "too high" in message:
        reason += f" (--vocab-size {args.vocab_size} is more than this much text supports; lower it or add text)"
    elif "smaller than required_chars" in message or "too small" in message.lower():
        reason += (
            f" (--vocab-size {args.vocab_size} must hold every character kept, and 256 bytes with --byte-fallback; "
            "raise it, or lower --character-coverage)"
        )
    elif "sentences_.empty()" in message:
        reason = f"--input {' '.join(args.input)}: no text" + "".join(f"\n{problem}" for problem in bad[:10])
    return f"SentencePiece: {reason}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, globs, folders or URLs")
    add("--json-keys", "--text-key", nargs="+", default=["text"], help="keys or columns with the text")
    add("--output-prefix", required=True, help="writes PREFIX.model and PREFIX.vocab")
    add("--overwrite", action="store_true", help="replace output files that exist")
    add("--vocab-size", type=int, required=True, help="number of tokens, including special tokens and bytes")
    add("--model-type", choices=("unigram", "bpe", "char", "word"), default="bpe", help="default: bpe")
    add("--character-coverage", type=float, default=0.9995, help="fraction of characters to keep (default: 0.9995)")
    add("--byte-fallback", action=argparse.BooleanOptionalAction, default=True, help="bytes for unknown characters")
    add("--normalization-rule-name", default="identity", help="identity (default), nfkc, nmt_nfkc, ...")
    add("--split-digits", action="store_true", help="make each digit a separate token")
    add(
        "--max-sentences",
        type=int,
        default=2_000_000,
        help="maximum number of lines to train on; 0: all lines. The lines are held in memory",
    )
    add("--unk-token", default="<unk>", help="token 0")
    add("--bos-token", default="<s>", help="token 1")
    add("--eos-token", default="</s>", help="token 2")
    add("--pad-token", default="<pad>", help="token 3")
    add("--eod-token", default="<EOD>", help="token 4; SentencePieceTokenizer looks for <EOD>")
    add("--user-defined-symbols", nargs="+", default=[], help="strings that are always encoded as a single token")
    add("--max-bad-lines", type=int, default=0, help="exit with an error if more lines are unreadable (default: 0)")
    add("--verbose", action="store_true", help="show SentencePiece's own log")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    from sentencepiece import SentencePieceProcessor

    args = parse_args(argv)
    if not 0 < args.character_coverage <= 1:
        raise ValueError(f"--character-coverage {args.character_coverage}: must be above 0 and at most 1")
    inputs = find_inputs(args.input)
    targets = {suffix: Path(args.output_prefix + suffix) for suffix in (".model", ".vocab")}
    refuse_output(list(targets.values()), args.overwrite)
    targets[".model"].parent.mkdir(parents=True, exist_ok=True)
    model, bad = train(args, inputs)
    pieces = SentencePieceProcessor(model_proto=model)
    scores = [f"{pieces.id_to_piece(id)}\t{pieces.get_score(id):g}\n" for id in range(pieces.get_piece_size())]
    for suffix, content in ((".vocab", "".join(scores).encode()), (".model", model)):
        with whole_file(targets[suffix]) as file:
            file.write_bytes(content)
    for problem in bad[:100]:
        print(f"{problem}; left out", file=sys.stderr)
    print(f"{targets['.model']}: {args.vocab_size} tokens, {args.model_type}, from {len(inputs)} files")
    if lost := [what for what, text in PROBES.items() if pieces.decode(pieces.encode(text)) != text]:
        remedy = "any --model-type but word is lossless with --byte-fallback and --normalization-rule-name identity"
        print(f"note: the tokenizer is lossy: decoding does not restore all {', '.join(lost)}; {remedy}")
    if len(bad) > args.max_bad_lines:
        print(f"error: {len(bad)} bad lines, but --max-bad-lines allows for {args.max_bad_lines}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
