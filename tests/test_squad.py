"""SQuAD: official scores, windows and their answers, predictions and files."""

import gzip
import json
import lzma
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert_jax.config.schema import FinetuneConfig, TaskConfig
from bert_jax.convert.source import OpenModel
from bert_jax.data import vocabulary_files
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.inference import predict
from bert_jax.storage import copies
from bert_jax.tasks import squad_score
from bert_jax.tasks.squad import Squad, _slide
from bert_jax.tasks.squad_score import Answer, Question

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = "the who was born when paris france leader john smith japan electronics".split()
VOCABULARY = Vocabulary(
    (*SPECIAL, *LETTERS, *(f"##{c}" for c in LETTERS), *"().,?'-東京", *WORDS, "japanese"), True
)


def question(name="q", answers=("paris",), text="who", context="john was born in paris"):
    return Question(name, text, context, tuple(Answer(a, max(context.find(a), 0)) for a in answers))


def layout(questions, **more):
    """Return the questions as SQuAD JSON."""
    paragraphs = []
    for q in questions:
        result = {"id": q.id, "question": q.text}
        if q.answers is not None:
            result["answers"] = [{"text": a.text, "answer_start": a.start} for a in q.answers]
        paragraphs.append({"context": q.context, "qas": [result]})
    return {"data": [{"title": "t", "paragraphs": paragraphs}], **more}


def save(path, value):
    path.write_text(json.dumps(value))
    return str(path)


def squad(tmp_path, questions, split="dev", **fields):
    path = save(tmp_path / f"{split}.json", layout(questions))
    fields = {"kind": "squad", "tokens": 32, "question_tokens": 8, "stride_tokens": 7} | fields
    return Squad(TaskConfig(**{split: path}, **fields), VOCABULARY)


def zeros(dataset, split="dev"):
    return [np.zeros((len(tokens), 2), np.float32) for tokens in dataset.splits[split].tokens]


def perfect(dataset, split="dev"):
    """Return logits that are highest at the targets of every window."""
    logits = zeros(dataset, split)
    for each, (first, last) in zip(logits, dataset.splits[split].targets["label"], strict=True):
        each[first, 0] = each[last, 1] = 9
    return logits


# Scores


@pytest.mark.parametrize(
    ("gold", "predicted", "version", "expected"),
    [
        ("the Denver Broncos", "Denver Broncos!", 1, (1, 1)),
        ("Denver Broncos", "Broncos", 1, (0, 2 / 3)),  # P 1, R 1/2
        ("a b c d", "b c x", 2, (0, 2 * (2 / 3) * (2 / 3) / (4 / 3))),  # "a" is an article
        ("b b c", "b b b", 2, (0, 2 / 3)),  # two of three tokens match
        ("the", "a", 1, (1, 0)),  # empty once normalized: F1 is 0 in 1.1 and 1 in 2.0
        ("the", "a", 2, (1, 1)),
        ("", "x", 2, (0, 0)),
        ("", "", 2, (1, 1)),
        ("U.S.-led Theatre", "usled theatre", 2, (1, 1)),
        ("the-a", "thea", 2, (1, 1)),  # punctuation is removed before articles
        ("\u2018the\u2019 x", "\u2018 \u2019 x", 2, (1, 1)),  # only ASCII punctuation
        ("Å B", "å b", 2, (1, 1)),
    ],
)
def test_exact_match_and_f1_of_one_answer(gold, predicted, version, expected):
    assert squad_score.compare(gold, predicted, version) == pytest.approx(expected)


def test_answers_empty_after_normalization_are_no_answers():
    """As in get_raw_scores of evaluate-v2.0.py, "" is correct if no other gold answer remains."""
    answers = {"a": ("the", "paris"), "b": ("the", "!"), "c": ("a",)}
    questions = [question(*each) for each in answers.items()]
    result = squad_score.score(questions, {"a": "", "b": "", "c": "paris"}, 2)
    # They still count as answerable.
    assert result["exact"] == result["HasAns_exact"] == pytest.approx(100 / 3)


def test_version_1_uses_best_answer_and_counts_missing_as_wrong():
    questions = [question("1", ("paris", "in paris")), question("2"), question("3")]
    result = squad_score.score(questions, {"1": "in Paris", "2": "born paris"}, 1)
    expected = {"exact": 100 / 3, "f1": 100 * (1 + 2 / 3) / 3, "total": 3, "missing": 1}
    assert result == pytest.approx(expected)


def test_version_2_scores_match_hand_computed_values():
    questions = [question("a"), question("b"), question("c", ()), question("d", ())]
    predicted = {"a": "paris", "b": "", "c": "", "d": "paris"}
    result = squad_score.score(questions, predicted, 2)
    assert result["exact"] == result["f1"] == 50
    assert (result["HasAns_exact"], result["NoAns_f1"], result["NoAns_total"]) == (50, 50, 2)
    # The odds of d are above the official threshold of 1, those of a are not.
    odds = {"a": 1.0, "b": 0.0, "c": -5.0, "d": 1.1}
    result = squad_score.score(questions, predicted, 2, odds)
    assert result["exact"] == 75
    assert result["NoAns_exact"] == 100
    # Threshold 1 changes only d to "": a is correct, b and c are "" already.
    assert (result["best_exact"], result["best_exact_thresh"]) == (75, 1.0)
    assert squad_score.score(questions, predicted, 2, odds, threshold=0.5)["HasAns_exact"] == 0


def naive_thresholds(questions, answers, odds, column):
    """Search for thresholds as evaluate-v2.0.py does, one question at a time."""
    by_id = {q.id: q for q in questions}
    now = best = sum(not q.answers for q in questions)
    threshold = 0.0
    for name in sorted(odds, key=lambda name: odds[name]):
        q = by_id[name]
        if q.answers:
            pairs = [squad_score.compare(a.text, answers[name], 2) for a in q.answers]
            now += max(pair[column] for pair in pairs)
        elif answers[name]:
            now -= 1
        if now > best:
            best, threshold = now, odds[name]
    return 100 * best / len(questions), threshold


CASES = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["paris", "in paris", "x", ""]), st.integers(-4, 4)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(CASES)
def test_best_thresholds_equal_the_official_search(cases):
    questions = [question(str(i), ("paris",) if has else ()) for i, (has, _, _) in enumerate(cases)]
    answers = {str(i): text for i, (_, text, _) in enumerate(cases)}
    odds = {str(i): float(value) for i, (_, _, value) in enumerate(cases)}
    result = squad_score.best_thresholds(questions, answers, odds)
    for column, name in enumerate(("exact", "f1")):
        expected = naive_thresholds(questions, answers, odds, column)
        assert (result[f"best_{name}"], result[f"best_{name}_thresh"]) == pytest.approx(expected)


# Reading


def one_answer(answers, **more):
    entry = {"id": "Q7", "question": "x", "answers": answers, **more}
    return {"data": [{"paragraphs": [{"context": "x", "qas": [entry]}]}]}


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\]\.paragraphs\[0\]: 'context'"),
        ({"data": []}, "no questions"),
        (layout([question("Q7"), question("Q7")]), "duplicate .*'Q7'"),
        (one_answer(None), "'Q7': 'answers'"),
        (one_answer([{"text": 3, "answer_start": 1}]), "'Q7': 'text'"),
        (one_answer([{"text": "x", "answer_start": 0}], is_impossible=True), "'Q7': is_impossible"),
        (b'{"data":\n[,', ":2: not JSON"),
        (b'{"data": "\xff"}', "not UTF-8"),
        (gzip.compress(b"{}" * 1000, mtime=0)[:20], "damaged"),
    ],
)
def test_malformed_squad_error_names_the_location(tmp_path, value, key):
    path = tmp_path / "x.json"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    with pytest.raises(UserError, match=f"{path}.*{key}"):
        squad_score.read(path)


def test_compressed_file_with_a_lone_surrogate_is_read(tmp_path):
    path, text = tmp_path / "x.json.gz", json.dumps(layout([question(context="a\ud800 paris")]))
    path.write_bytes(gzip.compress(text.encode()))
    (result,) = squad_score.read(path)
    assert result.context == "a? paris"  # character offsets stay the same


def test_prediction_files_are_scored_or_refused(tmp_path):
    def refused(key, *arguments):
        with pytest.raises(UserError, match=key):
            squad_score.score_file(*arguments)

    data = save(tmp_path / "data.json", layout([question("1"), question("2")]))
    good = save(tmp_path / "good.json", {"1": "paris", "2": "x", "other": "y"})
    result = squad_score.score_file(data, good, 1)
    assert result == {"exact": 50, "f1": 50, "total": 2, "missing": 0}
    odds = save(tmp_path / "odds.json", {"1": -3, "2": 3})
    assert squad_score.score_file(data, good, 2, odds)["best_f1_thresh"] == -3
    bad = tmp_path / "bad.json"
    for value, key in ((["paris"], "list"), ({"1": None}, "'1'"), ({"7": "x"}, "no prediction")):
        refused(key, data, save(bad, value), 1)
    for odd in ({}, {"2": float("nan")}, {"2": "x"}, {"2": 10**400}):
        refused("question '2'", data, good, 2, save(bad, {"1": 0.5, **odd}))
    for answers, version in (((), 1), (None, 2)):
        refused(
            "'Q7'", save(bad, layout([question("Q7")._replace(answers=answers)])), good, version
        )


# Windows


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20))
@example(620, 300, 250)  # a last window so short that its length decides the owner
def test_windows_cover_the_text_and_match_max_context(n, room, stride):
    starts, ends, own = _slide(n, room, stride)
    assert starts[0] == 0
    assert ends[-1] == n
    assert all(end - start <= room for start, end in zip(starts, ends, strict=True))
    steps = np.diff(starts)
    assert (steps == min(stride, room)).all()
    owners = {}
    for w, (low, high) in enumerate(own.tolist()):
        for place in range(low, high):
            assert owners.setdefault(place, w) == w
    for place in range(n):  # run_squad.py, _check_is_max_context
        best = None
        for w, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start <= place < end:
                score = min(place - start, end - 1 - place) + 0.01 * (end - start)
                if best is None or score > best[0]:
                    best = score, w
        assert owners[place] == best[1]


@pytest.mark.parametrize(
    ("context", "answer", "expected"),
    [
        ("the leader was john smith (1895-1943).", "1895", "1895"),
        ("the Japanese, electronics", "Japan", "Japanese,"),  # the whole word between spaces
        ("john was born in paris", "born in paris", "born in paris"),
        ("in  Paris\u00a0france", "Paris france", "Paris\u00a0france"),
        ("paris", "paris", "paris"),
        ("x paris paris", " paris ", "paris"),
        ("(b)-(b)", "b", "b"),
        ("x \u2603-\u265e paris", "\u265e", "\u265e"),  # the correct one of two [UNK]
        ("John was born in Pàris, France", "Pàris", "Pàris"),
        ("le cafe\u0301 x", "cafe\u0301", "cafe\u0301"),  # an accent stays with its letter
        ("in \U0001f600 10\u202fkm x", "10\u202fkm", "10\u202fkm"),
        ("İstanbul x", "İstanbul", "İstanbul"),
        ("x zürich/born", "zürich", "zürich"),
        ("x 東京 x", "東京", "東京"),
    ],
)
def test_answers_map_to_slices_of_the_context(tmp_path, context, answer, expected):
    start = context.find(answer)
    if start < 0:
        start = context.find(answer.split()[0])
    q = Question("q", "who", context, (Answer(answer, start),))
    dataset = squad(tmp_path, [q], tokens=80)
    assert (dataset.splits["dev"].targets["label"] > 0).all()
    logits = perfect(dataset)
    assert dataset.predict("dev", logits)["q"].answer == expected
    assert (dataset.score("dev", logits)["exact"] == 100) == (answer != "Japan")


def test_windows_match_the_layout_in_the_paper(tmp_path):
    context = " ".join("abcdefghijklmnopqrstuvwx")
    targets = {
        "h i": [[12, 13], [7, 8], [0, 0], [0, 0]],
        "j k": [[0, 0], [9, 10], [0, 0], [0, 0]],  # complete in only one window
        "x": [[0, 0], [0, 0], [0, 0], [13, 13]],
    }
    sizes = dict(tokens=16, question_tokens=3, stride_tokens=5)
    for answer, expected in targets.items():
        q = question(answers=(answer,), text="who was john smith", context=context)
        dataset = squad(tmp_path, [q], "train", **sizes)
        examples = dataset.splits["train"]
        assert examples.targets["label"].tolist() == expected
    assert examples.targets["label"].dtype == np.int32
    assert examples.a_length == [5] * 4
    assert dataset.report == ["train: 1 questions, 4 windows", "train: 1 questions cut to 3 tokens"]
    assert [VOCABULARY.decode(ids) for ids in examples.tokens] == [
        "[CLS] who was john [SEP] a b c d e f g h i j [SEP]",
        "[CLS] who was john [SEP] f g h i j k l m n o [SEP]",
        "[CLS] who was john [SEP] k l m n o p q r s t [SEP]",
        "[CLS] who was john [SEP] p q r s t u v w x [SEP]",
    ]


def test_misplaced_answers_are_dropped_from_training_only(tmp_path):
    wrong = [("paris", 0), ("paris", 900), ("paris", -1), ("", 3)]
    bad = [question(f"b{i}")._replace(answers=(Answer(*a),)) for i, a in enumerate(wrong)]
    dataset = squad(tmp_path, [question("good"), *bad], "train")
    assert len(dataset.splits["train"]) == 1
    assert any("4 questions dropped" in line and "'b0'" in line for line in dataset.report)
    dataset = squad(tmp_path, [question("good"), *bad], "dev")
    assert dataset.splits["dev"].targets["label"].tolist()[1:] == [[-1, -1]] * 4
    assert dataset.score("dev", zeros(dataset))["total"] == 5
    with pytest.raises(UserError, match=r"task\.train"):
        squad(tmp_path, bad, "train")


# Predictions


def reference_predictions(dataset, split, logits):
    """Predict like run_squad.py's write_predictions, in plain loops, with slices of the context."""
    config, result, remaining = dataset.config, {}, iter(logits)
    for asked in dataset._asked[split]:
        q, results, null = asked.question, [], None
        for first, (low, high) in zip(asked.first, asked.max_context, strict=True):
            scores = next(remaining).tolist()
            if null is None or sum(scores[0]) < sum(null):
                null = scores[0]
            best = [
                sorted(range(len(scores)), key=lambda t, k=k, s=scores: s[t][k], reverse=True)
                for k in (0, 1)
            ]
            at = asked.offset
            for s in best[0][: config.n_best]:
                for e in best[1][: config.n_best]:
                    if s < at or e < at or e >= len(scores) - 1 or e < s:
                        continue
                    if e - s + 1 > config.answer_tokens:
                        continue
                    if not low <= s - at + first < high:
                        continue
                    spans = asked.spans
                    end = spans[e - at + first, 1]
                    end += q.context[end : end + 1] == "\u0301"
                    text = q.context[spans[s - at + first, 0] : end]
                    results.append((text, scores[s][0], scores[e][1]))
        if dataset.unanswerable:
            results.append(("", *null))
        results.sort(key=lambda c: c[1] + c[2], reverse=True)
        n_best, seen = [], set()
        for candidate in results:
            if len(n_best) < config.n_best and candidate[0] not in seen:
                n_best.append(candidate)
                seen.add(candidate[0])
        if dataset.unanswerable and "" not in seen:
            n_best.append(("", *null))
        result[q.id] = n_best
    return result


PIECES = ["paris", "Japan,", "(1895-1943).", "né", "e\u0301", "a", "x\u00a0y", "\u200b"]
CONTEXTS = st.just("") | st.lists(st.sampled_from(PIECES), min_size=8, max_size=20).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(CONTEXTS, min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 9999),
    st.sampled_from([0, 2, 4]),
)
def test_predictions_equal_a_naive_search(
    tmp_path_factory, contexts, unanswerable, n_best, longest, seed, silence
):
    questions = [Question(str(i), "who was" * (i + 1), text, ()) for i, text in enumerate(contexts)]
    sizes = dict(tokens=16, question_tokens=4, stride_tokens=4, answer_tokens=longest)
    name = "squad2" if unanswerable else "squad1"
    folder = tmp_path_factory.mktemp("x")
    dataset = squad(folder, questions, "test", name=name, n_best=n_best, **sizes)
    rng = np.random.default_rng(seed)
    logits = [  # multiples of 1/2, so that ties occur
        rng.integers(-6, 6, (len(t), 2)).astype(np.float32) / 2
        for t in dataset.splits["test"].tokens
    ]
    for each in logits:
        each[0] += silence
    expected = reference_predictions(dataset, "test", logits)
    for name, result in dataset.predict("test", logits).items():
        mine = [tuple(c) for c in result.n_best]
        assert mine == (expected[name] or [("", 0, 0)])
        assert all(text in contexts[int(name)] for text, _, _ in mine)
        best = next((c for c in mine if c[0]), None)
        if unanswerable and n_best > 1 and best:
            assert result.answer == best[0]
            null = next(c for c in mine if not c[0])
            assert result.null_odds == null[1] + null[2] - best[1] - best[2]


def mixed_questions(n=30, seed=0):
    rng = random.Random(seed)
    questions = []
    for i in range(n):
        words = [rng.choice(WORDS[1:]) for _ in range(rng.randint(1, 30))]
        context, k = " ".join(words), rng.randrange(len(words))
        start = len(" ".join(words[:k])) + (k > 0)
        questions.append(Question(f"q{i}", "who", context, (Answer(words[k], start),)[: i % 3]))
    return questions


def test_prediction_files_reproduce_the_scores(tmp_path):
    dataset = squad(tmp_path, mixed_questions())
    assert dataset.unanswerable  # without a name, inferred from the answers
    rng = np.random.default_rng(0)
    logits = [each * 2 / 9 + rng.normal(size=each.shape) for each in perfect(dataset)]
    for each in logits:
        each[:, 0] += rng.choice([0, 1]) * (each[:, 0] > 2)
    result = dataset.score("dev", logits)
    dataset.write("dev", logits, tmp_path)
    data = tmp_path / "dev.json"
    again = squad_score.score_file(data, tmp_path / "predictions.json", 2)
    assert {k: result[k] for k in again} == again
    assert 0 < result["HasAns_f1"] < 100
    assert 0 < result["NoAns_f1"] < 100
    answers, odds = (tmp_path / f"{name}.json" for name in ("answers", "null_odds"))
    searched = squad_score.score_file(data, answers, 2, odds)
    best = {k: v for k, v in result.items() if k.startswith("best")}
    assert {k: searched[k] for k in best} == best
    assert result["best_f1"] >= result["f1"]
    assert dataset.tuned(result).score("dev", logits)["f1"] == pytest.approx(result["best_f1"])
    assert dataset.score("dev", logits) == result  # `tuned` leaves the original unchanged
    for entries in json.loads((tmp_path / "nbest_predictions.json").read_text()).values():
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1)
        assert "" in {entry["text"] for entry in entries}
        scores = np.array([entry["start_logit"] + entry["end_logit"] for entry in entries])
        ratio = entries[0]["probability"] / entries[-1]["probability"]
        assert ratio == pytest.approx(np.exp(scores[0] - scores[-1]))


@pytest.mark.parametrize(("answers", "version"), [(None, 1), ((), 1), (None, 2), ((), 2)])
def test_prediction_needs_no_gold_answers(tmp_path, answers, version):
    asked = [q._replace(answers=answers) for q in mixed_questions(5)]
    path = save(tmp_path / "new.json", layout(asked))
    config = TaskConfig(kind="squad", name=f"squad{version}", tokens=32, question_tokens=8)
    dataset = Squad(config, VOCABULARY, new=path)
    assert (dataset.splits["new"].targets["label"] == -1).all()
    logits = zeros(dataset, "new")
    for each in logits:
        each[0] = 50  # [CLS], which is an answer in version 2 only
    assert dataset.score("new", logits) == {}
    dataset.write("new", logits, tmp_path)
    assert (tmp_path / "null_odds.json").exists() == (version == 2)
    answers = json.loads((tmp_path / "predictions.json").read_text())
    assert all(
        (answers[q.id] == "") == (version == 2) and answers[q.id] in q.context for q in asked
    )


def test_new_data_get_the_threshold_of_the_same_step(tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "predict", lambda *_: [])
    path = save(tmp_path / "new.json", layout(mixed_questions(5)))
    task = TaskConfig(kind="squad", name="squad2", tokens=32, question_tokens=8)
    for name, step, threshold in (("metrics", 8, -1.0), ("metrics_4", 4, -3.0)):
        metrics = {"step": step, "dev": {"best_f1_thresh": threshold}}
        (tmp_path / f"{name}.json").write_text(json.dumps(metrics))
    for step, expected in ((8, -1.0), (4, -3.0), (6, 0.0)):
        opened = OpenModel(FinetuneConfig(task=task), VOCABULARY, {}, step)
        dataset, _ = predict.predict_new(opened, str(path), tmp_path)
        assert dataset.null_threshold == expected
    # A run on object storage is copied.
    monkeypatch.setattr(copies, "local", lambda url: tmp_path)
    dataset, _ = predict.predict_new(opened._replace(step=8), str(path), "gs://bucket/run")
    assert dataset.null_threshold == -1.0


def test_splits_are_read_from_a_data_folder(tmp_path):
    save(tmp_path / "train-v2.0.json", layout([question("1"), question("2", ())]))
    dev = json.dumps(layout([question("3")])).encode()
    (tmp_path / "dev-v2.0.json.xz").write_bytes(lzma.compress(dev))
    config = TaskConfig(kind="squad", name="squad2", data=str(tmp_path))
    assert set(Squad(config, VOCABULARY).splits) == {"train", "dev"}
    dataset = Squad(config, VOCABULARY, training=False, labels=("start", "end"))
    assert set(dataset.splits) == {"dev"}
    assert dataset.labels == ("start", "end")


@pytest.mark.parametrize(
    ("fields", "separators", "key"),
    [
        ({}, 1, r"config\.task\.train"),
        ({"data": "tfds", "name": "squad1"}, 1, r"train-v1\.1\.json"),
        ({"dev": "/nowhere.json"}, 1, "/nowhere.json"),
        ({"tokens": 67, "dev": "x"}, 1, "task.tokens=67"),
        ({"tokens": 68, "dev": "x"}, 2, "task.tokens=68"),
    ],
)
def test_invalid_configurations_are_refused(fields, separators, key):
    class Separated(Vocabulary):
        separator_ids = (3,) * separators

    with pytest.raises(UserError, match=key):
        Squad(TaskConfig(kind="squad", **fields), Separated(VOCABULARY.tokens, True))


def test_missing_answers_are_refused_except_for_prediction(tmp_path):
    with pytest.raises(UserError, match="'q1'"):
        squad(tmp_path, [question(), question("q1", ())], "train", name="squad1")
    for split in ("train", "dev"):
        with pytest.raises(UserError, match=r"'q' .*'answers'"):
            squad(tmp_path, [question()._replace(answers=None)], split)
    config = TaskConfig(kind="squad", name="squad2", dev=str(tmp_path / "dev.json"))
    dataset = Squad(config, VOCABULARY, labels=Squad.labels)  # prediction with a fine-tuned model
    assert dataset.score("dev", zeros(dataset)) == {}


@pytest.mark.nightly
def test_window_count_of_the_official_dev_set(shared_data):
    dev = shared_data("squad/dev-v1.1.json.gz")
    vocab = shared_data("vocab/bert-base-uncased-vocab.txt")
    config = TaskConfig(kind="squad", name="squad1", tokens=384, dev=str(dev))
    dataset = Squad(config, vocabulary_files.load(vocab))
    # As many windows as run_squad.py creates; no question is lost.
    assert dataset.report == ["dev: 10,570 questions, 10,833 windows"]
    assert max(map(len, dataset.splits["dev"].tokens)) == 384
    result = dataset.score("dev", perfect(dataset))
    # The rest are answers that are part of a token, or longer than 30 tokens.
    assert result["exact"] > 98.5
    assert result["f1"] > 99
