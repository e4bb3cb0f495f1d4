"""Question sets: the rules for options and answers, what errors name, keys pinned for ever, round trips."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.questions import (
    Question,
    read_questions,
    split_key,
    split_position,
    summarise,
    text_hash,
    write_questions,
)

EXAMPLE = Path(__file__).resolve().parents[1] / "data" / "example" / "questions.jsonl"
CHOICE = {"id": "1", "dataset": "d", "kind": "choice", "question": "Which?", "options": ["red", "blue"], "answer": 0}
NOUL = {"id": "1", "dataset": "d", "kind": "noul", "question": "Is it?", "answer": "yes"}
SCORE = {"id": "1", "dataset": "d", "kind": "score", "question": "How much?", "answer": 3}


def save(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_one(tmp_path: Path, record: dict[str, Any]) -> Question:
    (question,) = read_questions(save(tmp_path / "q.jsonl", record))
    return question


def error_of(path: Any) -> str:
    with pytest.raises(CalibError) as caught:
        read_questions(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_every_field_of_a_choice(tmp_path):
    record = CHOICE | {"state": "a shelf", "answer": "blue", "weight": 2, "group": "shelf", "source": "ignored"}
    assert read_one(tmp_path, record) == Question(
        "1", "d", "choice", "a shelf", "Which?", ("red", "blue"), answer=1, weight=2.0, group="shelf"
    )


def test_defaults_and_integers_as_names(tmp_path):
    record = {key: value for key, value in CHOICE.items() if key != "dataset"} | {"id": 7, "group": 12, "weight": None}
    (question,) = read_questions(save(tmp_path / "my.set.jsonl", record))
    assert (question.id, question.dataset, question.group) == ("7", "my.set", "12")
    assert (question.state, question.weight) == ("", 1.0)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("  kept as it is\n", "  kept as it is\n"),
        ({"b": 1, "a": ["ü", None, 1.5, True]}, '{"b":1,"a":["ü",null,1.5,true]}'),  # order kept, no escapes
        ([], "[]"),
        (3, "3"),
        (None, ""),
    ],
)
def test_state_is_text_or_compact_json(tmp_path, state, text):
    assert read_one(tmp_path, CHOICE | {"state": state}).state == text


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        (1, 1),  # a number is an index, although "1" could be mistaken for a text
        (2, 2),
        (2.0, 2),
        ("4", 1),  # a text is an option first ...
        ("0", 0),
        ("2", 2),
        ("1", 1),  # ... and an index only when no option has that text
        ("3", 3),
    ],
)
def test_answers_when_options_look_like_indices(tmp_path, answer, index):
    assert read_one(tmp_path, CHOICE | {"options": ["0", "4", "2", "6"], "answer": answer}).answer == index


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        ("yes", 1),
        ("no", 0),
        ("True", 1),
        ("FALSE", 0),
        (True, 1),
        (False, 0),
        (1, 1),
        (0, 0),
        ("1", 1),
        ("0", 0),
        (1.0, 1),
    ],
)
def test_noul_answers(tmp_path, answer, index):
    question = read_one(tmp_path, NOUL | {"answer": answer})
    assert question.options == ("false", "true")
    assert question.answer == index


@pytest.mark.parametrize("options", [["false", "true"], ["No", "Yes"]])
def test_noul_options_may_be_spelled_out_in_their_order(tmp_path, options):
    assert read_one(tmp_path, NOUL | {"options": options}).options == ("false", "true")


@pytest.mark.parametrize(
    ("levels", "answer", "index"),
    [
        (None, 3, 3),
        (None, "3", 3),
        (None, 0.0, 0),
        ([1, 2, 3], 3, 2),  # a level, not an index
        (["1", "2", "3"], "1", 0),
        (["10", "0"], 0, 1),
        (["poor", "fair", "good"], "good", 2),
        (["poor", "fair", "good"], 1, 1),  # no level is an integer, so an integer can only be an index
        (["0.5", "1.5"], 1.5, 1),
    ],
)
def test_score_answers_are_levels(tmp_path, levels, answer, index):
    question = read_one(tmp_path, SCORE | {"options": levels, "answer": answer})
    assert question.answer == index
    if levels is None:
        assert question.options == ("0", "1", "2", "3", "4", "5")


def test_255_options_are_read(tmp_path):
    options = [f"option {i}" for i in range(255)]
    assert read_one(tmp_path, CHOICE | {"options": options, "answer": "option 254"}).answer == 254


# --- what is refused: (change to a good record, field, words of the message) -----------------------------------------


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"id": None}, "id", "missing; every question needs id, kind, question and answer"),
        ({"id": ""}, "id", "missing"),
        ({"id": 1.5}, "id", "expected text or an integer, got the number 1.5"),
        ({"id": True}, "id", "expected text or an integer, got true"),
        ({"id": "a\0b"}, "id", "U+0000"),
        ({"dataset": ["d"]}, "dataset", "got a list"),
        ({"group": {"a": 1}}, "group", "got an object"),
        ({"kind": None}, "kind", "missing"),
        ({"kind": "multiple"}, "kind", '"multiple" is unknown; expected choice, noul or score'),
        ({"kind": "open"}, "kind", "'open' has no options; calib tunes option questions: choice, noul, score"),
        ({"kind": 1}, "kind", "expected text, got the number 1"),
        ({"question": " "}, "question", "is empty"),
        ({"question": ["Which?"]}, "question", "expected text, got a list"),
        ({"question": "half \ud83d"}, "question", "half a surrogate pair"),
        ({"state": float("nan")}, "state", "JSON cannot hold"),
        ({"state": {"x": [float("inf")]}}, "state", "JSON cannot hold"),
        ({"options": None}, "options", "missing; a choice needs a list of 2 to 255 texts"),
        ({"options": []}, "options", "expected 2 to 255, got 0"),
        ({"options": ["red"]}, "options", 'expected 2 to 255, got 1: ["red"]'),
        ({"options": [f"{i}" for i in range(256)]}, "options", "expected 2 to 255, got 256"),
        ({"options": ["red", "blue", "red"]}, "options", 'options 0 and 2 are both "red"; options must differ'),
        ({"options": ["red", 2]}, "options", "option 1 should be text, got the number 2; put it in quotes"),
        ({"options": ["red", None]}, "options", "option 1 should be text, got null"),
        ({"options": ["red", " "]}, "options", "option 1 is empty"),
        ({"options": ["red", "\ud83d"]}, "options", "half a surrogate pair"),
        ({"options": "red, blue"}, "options", 'expected a JSON list such as ["red", "blue"], got "red, blue"'),
        ({"options": {"a": "red"}}, "options", "expected a list of texts, got an object"),
        ({"answer": None}, "answer", "missing"),
        ({"answer": 2}, "answer", '2 is not among the indices 0 to 1 of the options ["red", "blue"]'),
        ({"answer": -1}, "answer", "-1 is not among the indices 0 to 1"),
        ({"answer": "2"}, "answer", "2 is not among the indices 0 to 1"),
        ({"answer": "green"}, "answer", '"green" is not among the options ["red", "blue"]'),
        ({"answer": "Blue "}, "answer", 'did you mean "blue"?'),
        ({"answer": "²"}, "answer", "is not among the options"),  # a digit to str.isdigit, not to int
        ({"answer": True}, "answer", "expected an index or the text of an option, got true"),
        ({"answer": 0.5}, "answer", "got the number 0.5"),
        ({"answer": float("nan")}, "answer", "got the number nan"),
        ({"answer": [0]}, "answer", "got a list"),
        ({"options": ["10", "20"], "answer": 20}, "answer", 'put it in quotes: "20"'),
        ({"weight": 0}, "weight", "expected a finite number above 0, got 0.0"),
        ({"weight": -1}, "weight", "above 0"),
        ({"weight": float("nan")}, "weight", "expected a finite number above 0, got nan"),
        ({"weight": float("inf")}, "weight", "expected a finite number above 0, got inf"),
        ({"weight": 10**400}, "weight", "got inf"),
        ({"weight": "heavy"}, "weight", 'expected a number above 0, got the text "heavy"'),
        ({"weight": True}, "weight", "got true"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, change, field, words):
    path = save(tmp_path / "bad.jsonl", CHOICE | {"id": "0"}, CHOICE | change)
    message = error_of(path)
    assert message.startswith(f"{path}, line 2, {field}: ")
    assert words in message


@pytest.mark.parametrize(
    ("record", "field", "words"),
    [
        (NOUL | {"answer": "maybe"}, "answer", 'expected yes, no, true, false, 1 or 0, got the text "maybe"'),
        (NOUL | {"answer": 2}, "answer", "got the number 2"),
        (NOUL | {"options": ["true", "false"]}, "options", "false, true in that order"),
        (SCORE | {"answer": 6}, "answer", '"6" is not among the levels ["0", "1", "2", "3", "4", "5"]'),
        (SCORE | {"answer": True}, "answer", "got true"),
        (SCORE | {"options": [1, 2, 3], "answer": 0}, "answer", '"0" is not among the levels ["1", "2", "3"]'),
        (SCORE | {"options": ["poor", "good"], "answer": 2}, "answer", "is not among the levels"),
        (SCORE | {"options": [1, "1"], "answer": 1}, "options", "levels must differ"),
        (SCORE | {"options": ["low"], "answer": "low"}, "options", "expected 2 to 255, got 1"),
    ],
)
def test_errors_of_noul_and_score(tmp_path, record, field, words):
    message = error_of(save(tmp_path / "bad.jsonl", record))
    assert f"bad.jsonl, line 1, {field}: " in message
    assert words in message


def test_long_option_lists_are_shortened_in_errors(tmp_path):
    options = [f"{'long ' * 30}{i}" for i in range(200)]
    message = error_of(save(tmp_path / "bad.jsonl", CHOICE | {"options": options, "answer": "none"}))
    assert "... 200 in all]" in message
    assert len(message) < 1000


def test_a_duplicate_id_names_both_places(tmp_path):
    first = save(tmp_path / "a.jsonl", CHOICE, CHOICE | {"id": "2"})
    second = save(tmp_path / "b.jsonl", CHOICE | {"dataset": "other"}, CHOICE | {"id": 2})
    message = error_of([first, second])
    assert message.startswith(f"{second}, line 2, id: ")
    assert f"already used in {first}, line 2" in message
    # The same id in another dataset is fine.
    assert len(read_questions([first, save(tmp_path / "c.jsonl", CHOICE | {"dataset": "other"})])) == 3


def test_no_path_is_an_error():
    assert ".jsonl" in error_of([])


@pytest.mark.parametrize(("n", "allowed"), [(99, False), (100, True)])
def test_a_repeated_option_is_let_through_only_where_it_is_rare(tmp_path, caplog, n, allowed):
    records = [CHOICE | {"id": str(i)} for i in range(n - 1)]
    path = save(tmp_path / "q.jsonl", CHOICE | {"id": "x", "options": ["7", "7", "9"], "answer": 1}, *records)
    with caplog.at_level(logging.WARNING, "calib.questions"):
        if not allowed:
            assert f'{path}, line 1, options: options 0 and 1 are both "7"' in error_of(path)
            return
        questions = read_questions(path)
    assert questions[0].options == ("7", "7", "9")
    assert questions[0].answer == 1
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f'{path}, line 1, options: options 0 and 1 are both "7"'
    ]


def test_the_text_of_a_repeated_option_is_no_answer(tmp_path):
    records = [CHOICE | {"id": str(i)} for i in range(200)]
    path = save(tmp_path / "q.jsonl", *records, CHOICE | {"id": "x", "options": ["7", "7", "9"], "answer": "7"})
    assert 'line 201, answer: "7" is the text of 2 options; give the index' in error_of(path)


# --- CSV and Parquet --------------------------------------------------------------------------------------------------

AWKWARD = ["a, b", 'she said "no"', "two\nlines", "tick ✅ 👩‍🚀", "crlf\r\nend"]


def save_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_csv_says_the_same_as_jsonl(tmp_path):
    rows: list[dict[str, Any]] = [
        CHOICE
        | {"options": json.dumps(AWKWARD), "answer": AWKWARD[2], "state": "x\ny, z", "weight": "0.5", "group": "g"},
        CHOICE | {"id": "2", "options": json.dumps(AWKWARD), "answer": "3"},
        CHOICE | {"id": "3", "options": json.dumps(["0", "4", "2", "6"]), "answer": "2"},
        NOUL | {"id": "4", "answer": "TRUE"},
        SCORE | {"id": "5"},
    ]
    questions = read_questions(save_csv(tmp_path / "q.csv", rows))
    assert [q.answer for q in questions] == [2, 3, 2, 1, 3]
    assert questions[0] == Question(
        "1", "d", "choice", "x\ny, z", "Which?", tuple(AWKWARD), answer=2, weight=0.5, group="g"
    )
    assert (questions[1].weight, questions[1].group, questions[1].state) == (1.0, None, "")


def test_csv_options_must_be_a_json_list(tmp_path):
    rows = [CHOICE | {"state": "two\nlines", "options": '["a","b"]'}, CHOICE | {"id": "2", "options": "a|b"}]
    message = error_of(save_csv(tmp_path / "q.csv", rows))
    assert "q.csv, line 4, options: expected a JSON list" in message  # the first record takes lines 2 and 3
    rows = [CHOICE | {"options": '"red"'}]
    assert 'expected a list of texts, got the text "red"' in error_of(save_csv(tmp_path / "q.csv", rows))


@pytest.mark.parametrize("as_text", [False, True])
def test_parquet_options_as_lists_or_json_text(tmp_path, as_text):
    options = [json.dumps(AWKWARD), json.dumps(["x", "y"])] if as_text else [AWKWARD, ["x", "y"]]
    table = pa.table(
        {
            "id": [1, 2],
            "kind": pa.array(["choice", "choice"]).dictionary_encode(),
            "question": ["Which?", "Which?"],
            "options": options,
            "answer": [4, 0],
            "state": [{"b": 1, "a": "ü"}, None],
            "weight": [None, 2.5],
            "unknown": [1, 2],
        }
    )
    pq.write_table(table, tmp_path / "set.parquet")
    first, second = read_questions(tmp_path / "set.parquet")
    assert first == Question("1", "set", "choice", '{"b":1,"a":"ü"}', "Which?", tuple(AWKWARD), answer=4)
    assert (second.id, second.state, second.weight) == ("2", "", 2.5)


def test_parquet_errors_count_records(tmp_path):
    columns = {name: [value, value] for name, value in CHOICE.items()} | {"id": ["1", "2"], "answer": [0, 5]}
    path = tmp_path / "q.parquet"
    pq.write_table(pa.table(columns), path)
    assert error_of(path).startswith(f"{path}, record 2, answer: 5 is not among the indices 0 to 1")


# --- keys -------------------------------------------------------------------------------------------------------------


def test_text_hash_is_pinned_for_ever():
    question = Question("id", "d", "choice", "ü", "Which?", ("red", "a:b"), answer=0)
    by_hand = b"6:choice" + b"2:\xc3\xbc" + b"6:Which?" + b"3:red" + b"3:a:b"
    assert text_hash(question) == hashlib.sha256(by_hand).hexdigest()
    assert text_hash(question) == "506c450efdec45a5fbf67a5287a7e26ca8334ce254bed89c5eb73cfb8c84b813"


def test_text_hash_holds_what_the_model_sees_and_nothing_else():
    question = Question("id", "d", "choice", "s", "q", ("a", "b"), answer=0)
    same = {"id": "other", "dataset": "other", "answer": 1, "weight": 2.0, "group": "g"}
    other = {"kind": "score", "state": "", "question": "q ", "options": ("b", "a")}
    assert all(text_hash(dataclasses.replace(question, **{k: v})) == text_hash(question) for k, v in same.items())
    hashes = {text_hash(dataclasses.replace(question, **{k: v})) for k, v in other.items()}
    assert len(hashes | {text_hash(question)}) == 5
    # Text that moves from one part to the next is another question.
    assert text_hash(dataclasses.replace(question, state="sq", question="")) != text_hash(question)
    assert text_hash(dataclasses.replace(question, options=("a1:b",))) != text_hash(question)


def test_the_split_follows_the_group_or_else_the_text():
    question = Question("id", "d", "choice", "s", "q", ("a", "b"))
    assert split_key(question) == text_hash(question)
    assert split_key(dataclasses.replace(question, group="story 1")) == "story 1"


def test_split_position_by_hand():
    # SHA-256 of the empty text starts with e3b0c44298fc1c14; the first 53 bits are that >> 11.
    assert split_position("") == (0xE3B0C44298FC1C14 >> 11) / 2**53
    assert 0 <= split_position("half \ud83d") < 1  # keys made by imports may hold what UTF-8 cannot


def test_split_positions_are_uniform():
    n, share = 4000, 0.3
    positions = [split_position(f"group {i}") for i in range(n)]
    assert min(positions) >= 0
    assert max(positions) < 1
    # Kolmogorov-Smirnov: above 1.95 / sqrt(n) once in a thousand sets of keys, and these keys never change.
    ranked = sorted(positions)
    assert max(abs(p - (i + 0.5) / n) for i, p in enumerate(ranked)) < 1.95 / n**0.5
    assert sum(p < share for p in positions) / n == pytest.approx(share, abs=3.3 * (share * (1 - share) / n) ** 0.5)


# --- writing ----------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12)
visible = texts.filter(lambda text: bool(text.strip()))


@st.composite
def question_sets(draw):
    names = draw(st.lists(st.tuples(texts, texts), min_size=1, max_size=5, unique=True))
    questions = []
    for dataset, name in names:
        kind = draw(st.sampled_from(["choice", "noul", "score"]))
        if kind == "noul":
            options = ("false", "true")
        else:
            option = visible | st.sampled_from(["0", "1", "2", "1 ", "1\x85", "a\u2028b", "\ufeffx", *AWKWARD])
            options = tuple(draw(st.lists(option, min_size=2, max_size=6, unique=True)))
        questions.append(
            Question(
                id=name,
                dataset=dataset,
                kind=kind,
                state=draw(st.one_of(st.just(""), texts)),
                question=draw(visible),
                options=options,
                answer=draw(st.integers(0, len(options) - 1)),
                weight=draw(st.floats(0, 1e300, exclude_min=True, allow_infinity=False)),
                group=draw(st.none() | texts),
            )
        )
    return questions


@settings(max_examples=60)
@given(questions=question_sets(), suffix=st.sampled_from([".jsonl", ".ndjson", ".jsonl.gz", ".JSONL"]))
def test_what_is_written_reads_back_the_same(tmp_path_factory, questions, suffix):
    path = tmp_path_factory.mktemp("round") / f"q{suffix}"
    write_questions(questions, path)
    assert read_questions(path) == questions
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_written_gzip_is_the_same_bytes_each_time(tmp_path):
    questions = read_questions(EXAMPLE)
    write_questions(questions, tmp_path / "a.jsonl.gz")
    write_questions(questions, tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


@pytest.mark.parametrize(
    ("questions", "name", "words"),
    [
        ([], "q.jsonl", "no questions to write"),
        ([Question("1", "d", "noul", "", "q", ("false", "true"))], "q.jsonl", "line 1, answer: missing"),
        ([Question("1", "d", "noul", "", "q", ("false", "true"), answer=2)], "q.jsonl", "line 1, answer: expected yes"),
        ([Question("1", "d", "choice", "", "q", ("a", "b"), answer=0)] * 2, "q.jsonl", "already used in"),
        ([Question("1", "d", "choice", "", "q", ("a", "b"), answer=0)], "q.csv", "written as JSONL only"),
        ([Question("1", "d", "choice", "", "q", ("a", "b"), answer=0)], "no/folder/q.jsonl", "no such file or folder"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(tmp_path, questions, name, words):
    (tmp_path / "q.jsonl").write_text("before")
    with pytest.raises(CalibError) as caught:
        write_questions(questions, tmp_path / name)
    assert words in str(caught.value)
    assert (tmp_path / "q.jsonl").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["q.jsonl"]


# --- sets -------------------------------------------------------------------------------------------------------------


def test_summary_by_dataset():
    a, b = ("a", "b"), ("a", "b", "c")
    summary = summarise(
        [
            Question("1", "z", "choice", "", "q", a, answer=0, group="g"),
            Question("2", "z", "choice", "", "q", b, answer=0, group="g"),
            Question("3", "z", "score", "", "q", b, answer=0, group="h"),
            Question("4", "y", "noul", "", "q", ("false", "true"), answer=0, weight=2.0),
        ]
    )
    assert [dataclasses.astuple(record) for record in summary] == [
        ("z", 3, {"choice": 2, "score": 1}, 2, 3, 2, False),
        ("y", 1, {"noul": 1}, 2, 2, 0, True),
    ]
    assert summarise([]) == []


def test_the_example_shows_every_feature():
    questions = read_questions(EXAMPLE)
    summary = {record.dataset: record for record in summarise(questions)}
    assert list(summary) == ["help-desk", "release-checks", "reports", "word-sums"]
    assert len(questions) == 24
    assert {q.kind for q in questions} == {"choice", "noul", "score"}
    assert summary["help-desk"].weighted
    assert summary["release-checks"].groups == 2
    assert "".join(questions[0].options).count("💳") == 1
    assert all(mark in "".join(questions[0].options) for mark in ',"\n')
    assert json.loads(questions[0].state)["plan"] == "basic"
    right = {q.id: q.options[q.answer] for q in questions if q.answer is not None}
    assert (right["sum-1"], right["sum-6"], right["release-5"], right["tone-1"]) == ("15", "REVER", "false", "furious")


def test_every_recorded_set_reads_but_the_open_one(shared, caplog):
    folder = shared / "realdata" / "questions"
    counts = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        if path.name == "gsm8k.jsonl.gz":
            assert error_of(path) == (
                f"{path}, line 1, kind: 'open' has no options; calib tunes option questions: choice, noul, score"
            )
        else:
            counts[path.name.split(".")[0]] = len(read_questions(path))
    assert counts == {"banking77": 385, "bbh": 506, "cladder": 400, "clinc150": 500, "mmlu": 570, "musr_small": 30}
    # MMLU's own slip: 2,396 - 1,709 with "687" twice.
    assert len(caplog.records) == 1
    assert "mmlu.jsonl.gz, line 154, options" in caplog.text


def test_reading_jsonl_imports_nothing_heavy():
    code = (
        "import sys; from calib.questions import read_questions; read_questions(sys.argv[1]); "
        "print(sorted({'numpy', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(EXAMPLE)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
