"""Text files as training data, and fill-in-the-middle samples.

Flags: --data-path and related flags accept local and remote JSON lines, JSON, plain text, CSV, Parquet and Arrow files.
Other flags are --text-key, --text-documents, --append-eod, --max-bad-lines, --tokenizer-workers, and --fim-data with
its related flags.

Read `inputs` first: it lists the files that a path names, and opens them. Then read `formats` for the documents in
these files, and `tokenized` for the resulting dataset. `encoding` tokenizes in several processes, `fast_tokenizer`
replaces slower tokenizers with gigatoken, and `fill_in_middle` rearranges the documents of samples.
"""
