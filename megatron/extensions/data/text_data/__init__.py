"""Text files as training data, and fill-in-the-middle samples.

Flags: --data-path and related flags with JSON lines, JSON, plain text, CSV, Parquet and Arrow files, local or remote;
--text-key, --text-documents, --append-eod, --max-bad-lines, --tokenizer-workers; --fim-data and related flags.

Read `inputs` first for the files that a path names and how they are opened, then `formats` for their documents, and
`tokenized` for the resulting dataset. `encoding` tokenizes in several processes, `fast_tokenizer` replaces slower
tokenizers with gigatoken, and `fill_in_middle` rearranges the documents of samples.
"""
