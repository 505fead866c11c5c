"""Text as training data, and fill-in-the-middle samples.

Flags: --data-path and its kin with files of JSON lines, JSON, plain text, CSV, Parquet and Arrow, local or remote;
--text-key, --text-documents, --append-eod, --max-bad-lines, --tokenizer-workers; --fim-data and its kin.

Read `inputs` for which files a path names, `formats` for their documents, then `tokenized` for the dataset that they
become. `encoding` tokenizes in several processes, `streams` opens and decompresses, `rows` reads whole small files,
`fast_tokenizer` lets gigatoken stand in for slower tokenizers, `fill_in_middle` rearranges the documents of samples.
"""
