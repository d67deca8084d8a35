"""Verbs that use a trained model: predict, score, fill-mask, score-sentences, attention, embed …"""

import argparse
import itertools
import json
import sys
from typing import Any

from bert_jax.cli.common import Parser, Verbs, add_checkpoint_option, add_model
from bert_jax.errors import UserError, with_user_paths


def add_predict(verbs: Verbs) -> None:
    """Add `bert-jax predict`."""
    sub = verbs.add(
        "predict",
        _predict,
        "run a fine-tuned model on new data",
        "  bert-jax predict --workdir runs/mine --out predictions new.csv\n"
        "  cat texts.txt | bert-jax predict --workdir runs/mine --out predictions -",
        platform="",
    )
    sub.add_argument(
        "source", nargs="?", default="-", metavar="FILE", help="data; - (default) reads lines"
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run")
    add_checkpoint_option(sub)
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the predictions")


def _predict(options) -> None:
    from bert_jax.inference import predict

    predict.predict_file(options.workdir, options.source, options.out, options.checkpoint)


def add_score(verbs: Verbs) -> None:
    """Add `bert-jax score`."""
    sub = verbs.add(
        "score",
        _score,
        "score predictions with a benchmark's official metrics",
        "  bert-jax score squad1 dev-v1.1.json predictions.json\n"
        "  bert-jax score glue:rte RTE/dev.tsv RTE.tsv\n"
        "  bert-jax score conll dev.txt predictions.conll",
    )
    sub.add_argument("benchmark", help="squad1, squad2, glue:TASK or conll")
    sub.add_argument("data", metavar="DATA", help="file with the answers")
    sub.add_argument("predictions", metavar="PREDICTIONS", help="file with the predictions")
    sub.add_argument("--null-odds", metavar="FILE", help="for squad2: null_odds.json")


def _score(options) -> None:
    from bert_jax.tasks import score

    metrics = score.score(options.benchmark, options.data, options.predictions, options.null_odds)
    for name, value in metrics.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")


def add_glue_zip(verbs: Verbs) -> None:
    """Add `bert-jax glue-zip`."""
    sub = verbs.add(
        "glue-zip",
        _glue_zip,
        "collect test predictions into a zip for the GLUE server",
        "  bert-jax glue-zip --out glue.zip runs/cola runs/sst2 runs/mnli",
    )
    sub.add_argument("folders", nargs="+", metavar="DIR", help="runs, whose data had test sets")
    sub.add_argument("--out", required=True, metavar="FILE", help="zip to write")


def _glue_zip(options) -> None:
    from bert_jax.tasks import glue

    for line in glue.submission(options.folders, options.out):
        print(line)


def _add_pll(sub: Parser) -> None:
    sub.add_argument(
        "--pll",
        choices=("original", "word-l2r"),
        default="original",
        help="pseudo-log-likelihood: each word piece is masked alone (default), or together with the "
        "rest of its word (PLL-word-l2r); does not apply to left-to-right models",
    )


def _add_texts(sub: Parser) -> None:
    sub.add_argument(
        "source",
        nargs="?",
        default="-",
        metavar="FILE",
        help="one text per line, .jsonl or .parquet, optionally compressed; - (default) reads lines",
    )
    sub.add_argument("--column", default="text", help="column of .jsonl or .parquet (default text)")


def add_score_sentences(verbs: Verbs) -> None:
    """Add `bert-jax score-sentences`."""
    sub = verbs.add(
        "score-sentences",
        _score_sentences,
        "compute the (pseudo-)log-likelihood of sentences, in nats",
        "  bert-jax score-sentences --init runs/mini sentences.txt > scores.tsv\n"
        "  cat texts.txt | bert-jax score-sentences --init runs/mini --pll word-l2r --tokens --json -",
        platform="",
    )
    _add_texts(sub)
    add_model(sub)
    _add_pll(sub)
    sub.flag("--tokens", "also print the log-probability of every word piece")
    sub.flag("--json", "print one JSON line per text (default: TSV)")


def _score_sentences(options) -> None:

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


def add_minimal_pairs(verbs: Verbs) -> None:
    """Add `bert-jax minimal-pairs`."""
    sub = verbs.add(
        "minimal-pairs",
        _minimal_pairs,
        "test a model's grammar on minimal pairs: BLiMP, Zorro or your own files",
        "  bert-jax minimal-pairs --init runs/mini --data blimp\n"
        "  bert-jax minimal-pairs --init runs/mini --data Zorro --pairs 200 --json",
        platform="",
    )
    sub.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders, or files, one per phenomenon: .jsonl with sentence_good and sentence_bad "
        "(BLiMP), or .txt with a grammatical line after each ungrammatical one (Zorro); may be "
        "compressed",
    )
    add_model(sub)
    sub.add_argument("--pairs", type=int, default=0, help="the first N of each file (default: all)")
    _add_pll(sub)
    sub.flag("--json", "print accuracies as JSON")


def _minimal_pairs(options) -> None:
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


def add_fill_mask(verbs: Verbs) -> None:
    """Add `bert-jax fill-mask`."""
    sub = verbs.add(
        "fill-mask",
        _fill_mask,
        "fill in the [MASK]s of a text",
        '  bert-jax fill-mask --init runs/mini "The capital of [MASK] is Paris."\n'
        "  cat texts.txt | bert-jax fill-mask --init runs/mini --json -",
        platform="",
    )
    sub.add_argument("texts", nargs="*", metavar="TEXT", help="texts; - or none reads lines")
    add_model(sub)
    sub.number("--top", 5, "candidates per mask")
    sub.flag("--json", "print one JSON line per text")


def _fill_mask(options) -> None:
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
            candidates_by_mask = [[c._asdict() for c in candidates] for candidates in masks]
            print(
                json.dumps({"text": text, "masks": candidates_by_mask}, ensure_ascii=False),
                flush=True,
            )
            continue
        print(text)
        for candidates in masks:
            print(
                "  " + "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates), flush=True
            )


def add_attention(verbs: Verbs) -> None:
    """Add `bert-jax attention`."""
    sub = verbs.add(
        "attention",
        _attention,
        "show the attention within a text, in every layer and head",
        '  bert-jax attention --init models/base --text "The bank of the river"\n'
        '  bert-jax attention --init models/base --text "Who wrote it?" --text-b "She did." --rollout',
        platform="",
    )
    add_model(sub)
    sub.add_argument("--text", required=True, help="text; [MASK] is read as the mask token")
    sub.add_argument("--text-b", metavar="TEXT", help="second text of a pair")
    sub.flag("--rollout", "also show attention rollout up to each layer")
    sub.add_argument(
        "--out", default="attention.html", metavar="FILE",
        help="page (.html, default %(default)s), with a .png of the same name; or image (.png, .svg or "
        ".pdf), with a .html of the same name",
    )  # fmt: skip


def _attention(options) -> None:
    from bert_jax.convert.source import open_model
    from bert_jax.inference.attention_maps import AttentionMapper
    from bert_jax.tools.report import attention

    attention.paths(options.out)  # check the output path before loading the model
    opened = open_model(options.init, options.checkpoint)
    maps = AttentionMapper(opened)(options.text, options.text_b)
    written = attention.write(maps, options.init, options.out, options.rollout)
    layers, heads, tokens, _ = maps.probabilities.shape
    paths = with_user_paths(", ".join(map(str, written)))
    print(f"{paths}: {layers} layers of {heads} heads, {tokens} tokens")


def add_embed(verbs: Verbs) -> None:
    """Add `bert-jax embed`."""
    sub = verbs.add(
        "embed",
        _embed,
        "compute vectors of texts",
        "  bert-jax embed --init models/minilm --out vectors.npy sentences.txt\n"
        "  bert-jax embed --init runs/mini --pooling none --layers last4 --out tokens.parquet a.jsonl\n"
        "  cat texts.txt | bert-jax embed --init runs/mini --out vectors.jsonl -",
        platform="",
    )
    _add_texts(sub)
    add_model(sub)
    sub.add_argument("--out", required=True, metavar="FILE", help=".npy, .jsonl or .parquet")
    _add_vectors(sub, "mean", "cls", "none")
    sub.add_argument(
        "--weights", metavar="W,W,…", help="one weight per layer: sum layers, do not concatenate"
    )
    sub.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to unit length"
    )
    sub.add_argument(
        "--long",
        choices=("truncate", "window"),
        default="truncate",
        help="truncate longer texts (default), or compute them in overlapping windows",
    )
    sub.add_argument(
        "--overlap", type=int, metavar="TOKENS", help="overlap of windows (default 64)"
    )


def _add_vectors(sub, *poolings: str) -> None:
    """Add the settings of `EmbedConfig` that change which vectors texts have."""
    sub.add_argument(
        "--pooling",
        choices=poolings,
        help="mean of a text's tokens, its [CLS]"
        + (", or none: one vector per token" if "none" in poolings else "")
        + " (default: the setting of a sentence encoder, else mean)",
    )
    sub.add_argument(
        "--layers",
        metavar="WHICH",
        help="last (default), second-to-last, last4, all, embeddings, or numbers: 0 is the "
        "embeddings, --layers=-4,-1 concatenates two layers",
    )
    sub.add_argument("--tokens", type=int, help="maximum tokens per text (default: all positions)")
    sub.add_argument(
        "--prompt", help="put this before every text (default: the prompt of a sentence encoder)"
    )


def _open_encoder(options) -> Any:
    """Return `open_model` of the options, with their settings of vectors."""
    from bert_jax.convert.source import open_model

    opened = open_model(options.init, options.checkpoint)
    for name in ("pooling", "layers", "normalize", "tokens", "prompt"):
        if (value := getattr(options, name, None)) is not None:
            setattr(opened.config.embed, name, value)
    return opened


def _embed(options) -> None:
    from bert_jax.inference.embed import Embedder, embed_file

    config, vocabulary, params, _ = _open_encoder(options)
    if options.overlap is not None and options.long != "window":
        raise UserError("--overlap applies to windows only: add --long window")
    try:
        weights = tuple(float(w) for w in options.weights.split(",")) if options.weights else ()
    except ValueError:
        raise UserError(
            f"--weights {options.weights}: it must be comma-separated numbers"
        ) from None
    embedder = Embedder(
        config,
        vocabulary,
        params,
        long=options.long,
        overlap_tokens=64 if options.overlap is None else options.overlap,
        weights=weights,
    )
    counts = embed_file(embedder, options.source, options.out, options.column)
    print(f"{options.out}: {counts}")


def add_evaluate_embeddings(verbs: Verbs) -> None:
    """Add `bert-jax evaluate-embeddings`."""
    sub = verbs.add(
        "evaluate-embeddings",
        _evaluate_embeddings,
        "score vectors of texts on similarity (STS) and retrieval (BEIR)",
        "  bert-jax evaluate-embeddings --init models/minilm sts-test.tsv beir/scifact\n"
        "  bert-jax evaluate-embeddings --init runs/pairs --columns question,answer faq.csv",
        platform="",
    )
    sub.add_argument(
        "data", nargs="+", metavar="FILE",
        help="a table (.tsv, .csv, .jsonl, .parquet) with the columns sentence1, sentence2 and score, "
        "or anchor and positive; or a folder in BEIR's layout",
    )  # fmt: skip
    add_model(sub)
    sub.add_argument(
        "--columns",
        metavar="A,B[,SCORE]",
        help="columns of the tables: two texts and their similarity, or a query and a relevant text",
    )
    sub.add_argument(
        "--qrels", default="test", metavar="NAME", help="file in qrels/ of a folder (default test)"
    )
    _add_vectors(sub, "mean", "cls")
    sub.flag("--json", "print a JSON line for each of the data")


def _evaluate_embeddings(options) -> None:
    from bert_jax.config.schema import TaskConfig
    from bert_jax.inference.embed import Embedder, evaluate

    similarity, pair = TaskConfig().similarity, ("anchor", "positive")
    if options.columns is not None:
        columns = tuple(options.columns.split(","))
        if len(columns) not in (2, 3):
            raise UserError(f"--columns {options.columns}: it must be two or three names")
        similarity, pair = (columns, ()) if len(columns) == 3 else ((), columns)
    config, vocabulary, params, _ = _open_encoder(options)
    embedder = Embedder(config, vocabulary, params)
    for path in options.data:
        scores = evaluate(embedder, path, similarity, pair, options.qrels)
        if options.json:
            print(json.dumps({"data": path, **scores}), flush=True)
            continue
        print(path)
        for name, value in scores.items():
            print(f"  {name:24} {value:.4f}", flush=True)
