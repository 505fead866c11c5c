"""Training on text files, and fill-in-the-middle samples.

Flags: --data-path and related flags accept local and remote JSON lines, JSON, plain text, CSV, Parquet and Arrow files.
Other flags are --text-key, --text-documents, --append-eod, --max-bad-lines, --tokenizer-workers, and --fim-data with
its related flags.

Read `inputs` first. It lists the files that a path names, and opens these files. Then read `formats`, which extracts
the documents from these files, and `tokenized`, which writes the tokenized dataset. `encoding` tokenizes in several
processes, `fast_tokenizer` replaces slower tokenizers with gigatoken, and `fill_in_middle` rearranges the documents of
samples.
"""
