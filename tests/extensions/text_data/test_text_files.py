"""Text files of every format give the same documents. Errors name the position in the file."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.extensions.data.text_data.formats import Reading, is_blank, read_chunks, texts_of
from megatron.extensions.data.text_data.inputs import find_inputs
from megatron.extensions.data.text_data.path_kind import TEXT
from tests.extensions.text_data.input_corruption import (
    COMPRESS,
    FORMATS,
    content_of,
    json_lines,
)
from tests.extensions.text_data.input_corruption import TEXTS as DOCUMENTS

TEXTS = ["", "x" * 70_000, *DOCUMENTS]


NAMES = [f"a{suffix}" for suffix in FORMATS if suffix != ".txt"]
NAMES += [f"a.jsonl{compression}" for compression in COMPRESS if compression] + ["a.parquet.gz"]


def documents(*paths: object, chunk_bytes: int = 1000, **reading: object) -> list[str]:
    how = Reading(**reading)  # type: ignore[arg-type]
    chunks = list(read_chunks(find_inputs([str(path) for path in paths]), how, chunk_bytes))
    at: dict[str, int] = {}
    for chunk in chunks:
        assert chunk.first == at.get(chunk.path, 1)
        at[chunk.path] = chunk.first + len(chunk.records)
    return [texts_of(record, chunk, how)[0] for chunk in chunks for record in chunk.records if not is_blank(record)]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_documents_in_every_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(content_of(name, TEXTS))
    assert documents(tmp_path / name) == TEXTS


@pytest.mark.parametrize("compression", COMPRESS)
def test_plain_text_has_a_document_per_file_or_line(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.txt{compression}"
    path.write_bytes(COMPRESS[compression](b"\xef\xbb\xbfone\r\n\ntwo\nthree"))
    assert documents(path) == ["one\r\n\ntwo\nthree"]
    assert documents(path, text_documents="line") == ["one", "two", "three"]


def test_a_folder_gives_its_known_files_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    files = {"b/c/2.txt": "two", "b/1.txt": "one", "z.txt": "last", ".hidden/x.txt": "x", "README.md": "y"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert documents(tmp_path) == ["one", "two", "last"]
    assert "left out 1 file of unknown format: README.md" in caplog.text


def test_linked_folders_are_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("data/own", "elsewhere/deep", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "data" / "a_link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "b_again").symlink_to(tmp_path / "data" / "own")
    (tmp_path / "elsewhere" / "deep" / "circle").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere" / "deep" / "other").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "gone").symlink_to(tmp_path / "nothing")
    assert documents(tmp_path / "data") == ["other", "elsewhere/deep", "data/own"]
    assert re.findall(r"(\S+) left out: it is the folder (\S+),", caplog.text) == [
        (f"{tmp_path}/data/b_again", f"{tmp_path}/data/own"),
        (f"{tmp_path}/data/a_link/deep/circle", f"{tmp_path}/data"),
    ]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "only").symlink_to(tmp_path / "other")
    assert data_kind_of(tmp_path / "links") is TEXT and documents(tmp_path / "links") == ["other"]


@pytest.mark.parametrize("start", ["SQLite is", "PAR1 ", "%PDF is a", "BZh9 ", "ARROW1 ", "MMIDIDX ", "PK "])
def test_text_may_begin_as_another_format_does(tmp_path: Path, start: str) -> None:
    (tmp_path / "a.txt").write_text(f"{start} text")
    assert documents(tmp_path / "a.txt") == [f"{start} text"]


def test_files_of_other_formats_are_recognized(tmp_path: Path) -> None:
    import sqlite3

    database = sqlite3.connect(tmp_path / "a.db")
    database.execute("create table t (x)")
    database.commit()
    made = {"a database": (tmp_path / "a.db").read_bytes(), "a PDF": b"%PDF-1.7\n%\xe2\xe3"}
    made |= {"Parquet": content_of("a.parquet", TEXTS), "Arrow": content_of("a.arrow", TEXTS)}
    made |= {"compressed; name it .bz2": COMPRESS[".bz2"](b""), "compressed; name it .xz": COMPRESS[".xz"](b"x")}
    for kind, content in made.items():
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=f"this looks like {kind}"):
            documents(tmp_path / "a.txt")


@pytest.mark.parametrize("window", [27, 28, 31])
def test_zstd_files_with_long_windows_are_read(tmp_path: Path, window: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=window)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    lines = json_lines(TEXTS)
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(lines) + compressor.flush())
    assert documents(tmp_path / "a.jsonl.zst") == TEXTS


@pytest.mark.parametrize("kind", ["string_view", "dictionary", "dictionary_view", "run_end_encoded", "extension"])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_text_columns_of_every_kind_are_read(tmp_path: Path, kind: str, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["one", "a text of more than twelve bytes", "", "café", "a text of more than twelve bytes"]
    plain = pa.array(texts)
    column = {
        "string_view": lambda: pa.array(texts, pa.string_view()),
        "dictionary": plain.dictionary_encode,
        "dictionary_view": lambda: pa.DictionaryArray.from_arrays(
            [0, 1, 2, 3, 1], pa.array(texts[:4], pa.string_view())
        ),
        "run_end_encoded": lambda: pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4, 5], texts),
        "extension": lambda: pa.ExtensionArray.from_storage(pa.json_(pa.string()), plain),
    }[kind]()
    table = pa.table({"text": column})
    if name == "a.arrow":
        with pa.OSFile(str(tmp_path / name), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
    elif kind in ("run_end_encoded", "dictionary_view"):
        pytest.skip("pyarrow does not write this layout to Parquet")
    else:
        pq.write_table(table, tmp_path / name)
    assert documents(tmp_path / name) == texts


def test_a_string_that_is_not_utf_8_affects_only_its_row(tmp_path: Path) -> None:
    import pyarrow as pa

    made = pa.array([b"one", b"\xff and more than twelve bytes", None, b"four"], pa.binary_view())
    table = pa.table({"text": pa.Array.from_buffers(pa.string_view(), 4, made.buffers())})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    (chunk,) = read_chunks(find_inputs([str(tmp_path / "a.arrow")]), Reading(), 1 << 20)
    assert texts_of(chunk.records[0], chunk, Reading()) == ["one"]
    assert texts_of(chunk.records[3], chunk, Reading()) == ["four"]
    with pytest.raises(ValueError, match="not UTF-8: byte 0 of 'text' is 0xff"):
        texts_of(chunk.records[1], chunk, Reading())


@pytest.mark.parametrize(("codec", "found"), [("utf-16", "UTF-16"), ("utf-16-be", "UTF-16"), ("latin-1", "LATIN1")])
def test_another_encoding_is_reported_with_the_remedy(tmp_path: Path, codec: str, found: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}'.encode(codec))
    (chunk,) = read_chunks(find_inputs([str(tmp_path / "a.jsonl")]), Reading(), 1 << 20)
    with pytest.raises(ValueError, match=f"^not UTF-8: .*, such as with iconv -f {found} -t UTF-8$"):
        texts_of(chunk.records[0], chunk, Reading())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,text\n1,é".encode("latin-1"), "not UTF-8: byte 0xe9; .* iconv -f LATIN1 -t UTF-8"),
        ("id,text\n1,é".encode("utf-16"), "not UTF-8: byte 0xff; .* iconv -f UTF-16 -t UTF-8"),
        (b"id;text\n1;one", r"no column 'text' .*'id;text'; \.csv needs commas between values, \.tsv tabs"),
    ],
    ids=["latin-1", "utf-16", "semicolons"],
)
def test_a_table_of_another_dialect_is_reported_with_the_remedy(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ValueError, match=f"a.csv: cannot be read after row 0: {said}$"):
        documents(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_integers_of_any_length_are_read(tmp_path: Path, name: str) -> None:
    """By default, Python refuses to convert strings of more than 4,300 digits to integers."""
    rows = ['{"id": %s, "text": "one"}' % ("9" * 5000), '{"id": [-%s], "text": "two"}' % ("7" * 300_000)]
    (tmp_path / name).write_text(f"[{', '.join(rows)}]" if name == "a.json" else "\n".join(rows))
    assert documents(tmp_path / name) == ["one", "two"]
    number = rows[0].replace('"one"', "9" * 5000)
    (tmp_path / name).write_text(f"[{number}]" if name == "a.json" else number)
    with pytest.raises(ValueError, match="'text' is not text, but a number"):
        documents(tmp_path / name)


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_concatenated_streams_are_read_and_truncated_ones_refused(tmp_path: Path, compression: str) -> None:
    first, second = (COMPRESS[compression](json_lines(TEXTS[part])) for part in (slice(0, 6), slice(6, None)))
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(first + second)
    assert documents(path) == TEXTS
    for damaged in (first + second[:-5], first + second[: len(second) // 2], first + b"garbage" + second, b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.jsonl.*: damaged after \w+ \d+: "):
            documents(path)


MISNAMED = [
    ("a.jsonl", b"PAR1\x15\x04\x15", "this looks like Parquet; name it .parquet"),
    ("a.txt", gzip.compress(b"x", mtime=0), "this looks like compressed; name it .gz"),
    ("a.json", b'[{"text": "a"}, {"text": "b"', "cannot be read after record 1: not JSON"),
    ("a.json", b'[{"text": "a"} {"text": "b"}]', "cannot be read after record 1: not a JSON array"),
    ("a.json", b'[{"text": "a"}] more', "after the end of the array"),
    ("a.json", b'[{"text": nope}' + b" " * 600_000 + b"]", "cannot be read after record 0: not JSON"),
    ("a.json", b'{\n  "text": "a"\n}\n', "a JSON object spans several lines; write one object per line, or an array"),
    ("a.jsonl", b'{"text": "a",\n "id": [\n  1]}\n', "a JSON object spans several lines; write one object per line"),
    ("a.csv", b"id,words\n1,x\n", "no column 'text' (--json-keys); the columns are 'id', 'words'"),
    ("a.csv", b'id,text\n1,"x\n', "cannot be read after row 0: unexpected end of data"),
    ("a.csv", b"id,text\n1,\xff\n", "not UTF-8: byte 0xff"),
    ("a.parquet", b"PAR1 and nothing else", "invalid Parquet file"),
    ("a.arrow", b"nothing of it", "invalid Arrow file"),
]


@pytest.mark.parametrize(("name", "content", "said"), MISNAMED)
def test_content_that_contradicts_the_file_name_is_reported(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name)) + ".*" + re.escape(said)):
        documents(tmp_path / name)


def test_a_truncated_first_line_affects_no_other_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":\n{"text": "b"}\n')
    (chunk,) = read_chunks(find_inputs([str(tmp_path)]), Reading(), 1 << 20)
    assert texts_of(chunk.records[1], chunk, Reading()) == ["b"]


def test_a_bad_row_affects_no_other_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.Array.from_buffers(pa.string(), 4, pa.array([b"one", b"\xff", None, b"four"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_bytes(b"text,id\none,1\n\ntwo\nfour,4\n")
    how, found = Reading(), []
    for chunk in read_chunks(find_inputs([str(tmp_path)]), how, 1 << 20):
        for number, record in enumerate(chunk.records, chunk.first):
            try:
                found += texts_of(record, chunk, how)
            except ValueError as error:
                found.append(f"{number}: {error}")
    assert found == [
        *("one", "2: 1 values, but the first row names 2 columns", "four"),
        *("one", "2: not UTF-8: byte 0 of 'text' is 0xff", "3: 'text' is not text, but null", "four"),
    ]
