"""Text as training data, and fill-in-the-middle samples.

Flags: --data-path and related flags with JSON lines, JSON, plain text, CSV, Parquet and Arrow files, local or remote;
--text-key, --text-documents, --append-eod, --max-bad-lines, --tokenizer-workers; --fim-data and related flags.

Read `inputs` for which files a path names and how they are opened, `formats` for their documents, then `tokenized` for
the dataset that they become. `encoding` tokenizes in several processes, `fast_tokenizer` lets gigatoken stand
in for slower tokenizers, `fill_in_middle` rearranges the documents of samples.
"""
