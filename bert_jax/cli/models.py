"""Verbs that use a trained model: predict, score, fill-mask, score-sentences, attention, embed …"""

import argparse
import itertools
import json
import sys
from typing import Any

from bert_jax.cli.common import (
    CHECKPOINT,
    MODEL,
    WORKDIR,
    Argument,
    argument,
    choice,
    flag,
    number,
    option,
    verb,
)
from bert_jax.errors import UserError, counted, with_user_paths


def _source(text: str) -> Argument:
    text = f"{text}; - (default) reads lines"
    return option("source", "FILE", text, nargs="?", default="-")


@verb(
    _source("data"),
    WORKDIR,
    CHECKPOINT,
    option("--out", "DIR", "new folder for the predictions", required=True),
    platform="",
)
def _predict(options) -> None:
    """Run a fine-tuned model on new data.

    bert-jax predict --workdir runs/mine --out predictions new.csv
    cat texts.txt | bert-jax predict --workdir runs/mine --out predictions -
    """
    from bert_jax.inference import predict

    predict.predict_file(options.workdir, options.source, options.out, options.checkpoint)


@verb(
    argument("benchmark", help="squad1, squad2, glue:TASK or conll"),
    option("data", "DATA", "file with the answers"),
    option("predictions", "PREDICTIONS", "file with the predictions"),
    option("--null-odds", "FILE", "for squad2: null_odds.json"),
)
def _score(options) -> None:
    """Score predictions with a benchmark's official metrics.

    bert-jax score squad1 dev-v1.1.json predictions.json
    bert-jax score glue:rte RTE/dev.tsv RTE.tsv
    bert-jax score conll dev.txt predictions.conll
    """
    from bert_jax.tasks import score

    metrics = score.score(options.benchmark, options.data, options.predictions, options.null_odds)
    for name, value in metrics.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")


@verb(
    option("folders", "DIR", "runs, whose data had test sets", nargs="+"),
    option("--out", "FILE", "zip to write", required=True),
)
def _glue_zip(options) -> None:
    """Collect test predictions into a zip for the GLUE server.

    bert-jax glue-zip --out glue.zip runs/cola runs/sst2 runs/mnli
    """
    from bert_jax.tasks import glue

    for line in glue.submission(options.folders, options.out):
        print(line)


_PLL = choice(
    "--pll",
    "original word-l2r",
    "pseudo-log-likelihood: each word piece is masked alone, or together with the rest of its word "
    "(PLL-word-l2r); does not apply to left-to-right models",
)
_TEXTS = (
    _source("one text per line, .jsonl or .parquet, optionally compressed"),
    argument("--column", default="text", help="column of .jsonl or .parquet (default text)"),
)


@verb(
    *_TEXTS,
    *MODEL,
    _PLL,
    flag("--tokens", "also print the log-probability of every word piece"),
    flag("--json", "print one JSON line per text (default: TSV)"),
    platform="",
)
def _score_sentences(options) -> None:
    """Compute the (pseudo-)log-likelihood of sentences, in nats.

    bert-jax score-sentences --init runs/mini sentences.txt > scores.tsv
    cat texts.txt | bert-jax score-sentences --init runs/mini --pll word-l2r --tokens --json -
    """
    from bert_jax.convert.source import open_model
    from bert_jax.data.texts import read
    from bert_jax.inference.sentence_scores import SentenceScorer

    texts = (text for text, _ in read(options.source, options.column).texts)
    scorer = SentenceScorer(open_model(options.init, options.checkpoint))
    if not options.json:
        print("text\ttoken\tlog_probability" if options.tokens else "score\ttokens\ttext")
    number = 0
    while batch := list(itertools.islice(texts, 1024)):
        for text, tokens in zip(batch, scorer.tokens(batch, options.pll), strict=True):
            number += 1
            score = sum(token.log_probability for token in tokens)
            if options.json:
                line = {"text": text, "score": round(score, 6), "num_tokens": len(tokens)}
                if options.tokens:
                    line["tokens"] = [
                        {"token": name, "log_probability": round(x, 6)} for name, x in tokens
                    ]
                print(json.dumps(line, ensure_ascii=False))
            elif options.tokens:
                for name, log_probability in tokens:
                    print(f"{number}\t{name}\t{log_probability:.6f}")
            else:  # a text is one field of one line
                print(f"{score:.6f}\t{len(tokens)}\t{' '.join(text.split())}")
        sys.stdout.flush()


@verb(
    option(
        "--data",
        "DIR",
        "folders, or files, one per phenomenon: .jsonl with sentence_good and sentence_bad (BLiMP), or .txt "
        "with a grammatical line after each ungrammatical one (Zorro)",
        nargs="+",
        required=True,
    ),
    *MODEL,
    argument("--pairs", type=int, default=0, help="the first N of each file (default: all)"),
    _PLL,
    flag("--json", "print accuracies as JSON"),
    platform="",
)
def _minimal_pairs(options) -> None:
    """Test a model's grammar on minimal pairs: BLiMP, Zorro or your own files.

    bert-jax minimal-pairs --init runs/mini --data blimp
    bert-jax minimal-pairs --init runs/mini --data Zorro --pairs 200 --json
    """
    from bert_jax.tools import minimal_pairs

    accuracies = minimal_pairs.evaluate(
        options.init, options.data, options.pairs, options.checkpoint, options.pll
    )
    if options.json:
        print(json.dumps(accuracies._asdict()))
        return
    by_phenomenon, by_term, by_field = accuracies[1:]
    width = max(map(len, (*by_phenomenon, *by_term, *by_field)))
    for group in (by_phenomenon, by_term, by_field, {"mean": accuracies.mean}):
        for name, accuracy in group.items():
            print(f"{name:{width}}  {accuracy:6.1%}")
        if group and len(group) > 1:
            print()


@verb(
    option("texts", "TEXT", "texts; - or none reads lines", nargs="*"),
    *MODEL,
    number("--top", 5, "candidates per mask"),
    flag("--json", "print one JSON line per text"),
    platform="",
)
def _fill_mask(options) -> None:
    """Fill in the [MASK]s of a text.

    bert-jax fill-mask --init runs/mini "The capital of [MASK] is Paris."
    cat texts.txt | bert-jax fill-mask --init runs/mini --json -
    """
    from bert_jax.convert.source import open_model
    from bert_jax.inference.fill_mask import MaskFiller

    fill = MaskFiller(open_model(options.init, options.checkpoint))
    texts = options.texts
    if texts in ([], ["-"]):
        from bert_jax.data.texts import read

        texts = (text for text, _ in read("-", "text").texts if text.strip())
    for text in texts:
        masks = fill(text, options.top)
        if options.json:
            line = {"text": text, "masks": [[c._asdict() for c in mask] for mask in masks]}
            print(json.dumps(line, ensure_ascii=False), flush=True)
            continue
        print(text)
        for mask in masks:
            print("", *(f"{c.token} {c.probability:.1%}" for c in mask), sep="  ", flush=True)


@verb(
    *MODEL,
    argument("--text", required=True, help="text; [MASK] is read as the mask token"),
    option("--text-b", "TEXT", "second text of a pair"),
    flag("--rollout", "also show attention rollout up to each layer"),
    option(
        "--out",
        "FILE",
        "page (.html, default %(default)s), with a .png of the same name; or an image (.png, .svg, .pdf)",
        default="attention.html",
    ),
    platform="",
)
def _attention(options) -> None:
    """Show the attention within a text, in every layer and head.

    bert-jax attention --init models/base --text "The bank of the river"
    bert-jax attention --init models/base --text "Who wrote it?" --text-b "She did." --rollout
    """
    from bert_jax.convert.source import open_model
    from bert_jax.inference.attention_maps import AttentionMapper
    from bert_jax.tools.report import attention

    attention.paths(options.out)  # check the output path before loading the model
    opened = open_model(options.init, options.checkpoint)
    maps = AttentionMapper(opened)(options.text, options.text_b)
    written = attention.write(maps, options.init, options.out, options.rollout)
    layers, heads, tokens, _ = maps.probabilities.shape
    paths = with_user_paths(", ".join(map(str, written)))
    print(f"{paths}: {counted(layers, 'layer')} of {counted(heads, 'head')}, {tokens} tokens")


def _vectors(*poolings: str) -> tuple[Argument, ...]:
    """Return the settings of `EmbedConfig` that change which vectors texts have."""
    one_each = ", or none: one vector per token" if "none" in poolings else ""
    return (
        argument(
            "--pooling",
            choices=poolings,
            help=f"mean of a text's tokens, its [CLS]{one_each} (default: the setting of a sentence "
            "encoder, else mean)",
        ),
        option(
            "--layers",
            "WHICH",
            "last (default), second-to-last, last4, all, embeddings, or numbers: 0 is the embeddings, "
            "--layers=-4,-1 joins the last layer and the fourth from the end",
        ),
        argument("--tokens", type=int, help="maximum tokens per text (default: all positions)"),
        argument("--prompt", help="put before every text (default: that of a sentence encoder)"),
    )


def _encoder(options, **settings: Any) -> Any:
    """Return the `Embedder` of a model, with the options that change which vectors texts have."""
    from bert_jax.convert.source import open_model
    from bert_jax.inference.embed import Embedder

    config, vocabulary, params, _ = open_model(options.init, options.checkpoint)
    for name in ("pooling", "layers", "normalize", "tokens", "prompt"):
        if (value := getattr(options, name, None)) is not None:
            setattr(config.embed, name, value)
    return Embedder(config, vocabulary, params, **settings)


@verb(
    *_TEXTS,
    *MODEL,
    option("--out", "FILE", ".npy or .jsonl", required=True),
    *_vectors("mean", "cls", "none"),
    option("--weights", "W,W,…", "sum the layers with these weights, one per layer"),
    argument("--normalize", action=argparse.BooleanOptionalAction, help="scale to unit length"),
    choice("--long", "truncate window", "truncate longer texts, or compute overlapping windows"),
    option("--overlap", "TOKENS", "overlap of windows (default 64)", type=int),
    platform="",
)
def _embed(options) -> None:
    """Compute vectors of texts.

    bert-jax embed --init models/minilm --out vectors.npy sentences.txt
    bert-jax embed --init runs/mini --pooling none --layers last4 --out tokens.npy a.jsonl
    cat texts.txt | bert-jax embed --init runs/mini --out vectors.jsonl -
    """
    from bert_jax.inference.embed import embed_file

    if options.overlap is not None and options.long != "window":
        raise UserError("--overlap applies to windows only: add --long window")
    try:
        weights = tuple(float(w) for w in options.weights.split(",")) if options.weights else ()
    except ValueError:
        raise UserError(f"--weights {options.weights}: it must be like 0.5,0.5") from None
    overlap = 64 if options.overlap is None else options.overlap
    embedder = _encoder(options, long=options.long, overlap_tokens=overlap, weights=weights)
    counts = embed_file(embedder, options.source, options.out, options.column)
    print(f"{options.out}: {counts}")


@verb(
    option(
        "data",
        "FILE",
        "a table (.tsv, .csv, .jsonl, .parquet) with the columns sentence1, sentence2 and score, "
        "or anchor and positive; or a folder in BEIR's layout",
        nargs="+",
    ),
    *MODEL,
    option(
        "--columns", "A,B[,SCORE]", "two texts and their similarity, or a query and a relevant text"
    ),
    option("--qrels", "NAME", "file in qrels/ (default test)", default="test"),
    *_vectors("mean", "cls"),
    flag("--json", "print a JSON line for each of the data"),
    platform="",
)
def _evaluate_embeddings(options) -> None:
    """Score vectors of texts on similarity (STS) and retrieval (BEIR).

    bert-jax evaluate-embeddings --init models/minilm sts-test.tsv beir/scifact
    bert-jax evaluate-embeddings --init runs/pairs --columns question,answer faq.csv
    """
    from bert_jax.config.schema import TaskConfig
    from bert_jax.inference.embed import evaluate

    similarity, pair = TaskConfig().similarity, ("anchor", "positive")
    if options.columns is not None:
        columns = tuple(options.columns.split(","))
        if len(columns) not in (2, 3):
            raise UserError(f"--columns {options.columns}: it must be two or three names")
        similarity, pair = (columns, ()) if len(columns) == 3 else ((), columns)
    embedder = _encoder(options)
    for path in options.data:
        scores = evaluate(embedder, path, similarity, pair, options.qrels)
        if options.json:
            print(json.dumps({"data": path, **scores}), flush=True)
            continue
        print(path)
        for name, value in scores.items():
            print(f"  {name:24} {value:.4f}", flush=True)
