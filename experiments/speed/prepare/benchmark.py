"""Benchmark `prepare` against the tokenizer alone and a plain Python implementation.

    python experiments/speed/prepare/benchmark.py --vocab vocab.txt --text wiki.txt [--rounds 3]
    python experiments/speed/prepare/benchmark.py --vocab vocab.txt --text wiki.txt --memory
    python experiments/speed/prepare/benchmark.py --vocab vocab.txt --text wiki.txt --fill
    python experiments/speed/prepare/benchmark.py --vocab vocab.txt --text wiki.txt --beam   # extra beam

Each run appends its numbers to results.jsonl beside this file and rewrites README.md from all of
them. Run it on an idle machine.

Speed is bytes of text per second of wall-clock time, in rounds in which the candidates take turns
(`tokenizer`: encode_batch and encode_batch_fast on all cores, of paragraphs and of sentences;
`prepare`: from the file to the manifest, including the start of the process; `plain`: one core, on a
part of the text).
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import unicodedata

import psutil

from bert_jax.data import corpus, wordpiece
from bert_jax.data.prepare import prepare
from bert_jax.data.sentences import split_sentences

HERE = pathlib.Path(__file__).parent
PLAIN_BYTES = 500_000


# The baseline: a straightforward implementation that makes the same passes over each sentence as
# tokenization.py and create_pretraining_data.py. Without masking, which `prepare` does not do either.


def is_whitespace(character):
    return character in " \t\n\r" or unicodedata.category(character) == "Zs"


def is_control(character):
    return character not in "\t\n\r" and unicodedata.category(character) in ("Cc", "Cf")


def is_punctuation(character):
    code = ord(character)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(character).startswith("P")


CHINESE = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
           (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))  # fmt: skip


def is_chinese(character):
    code = ord(character)
    return any(first <= code <= last for first, last in CHINESE)


def cleaned(text):
    output = []
    for character in text:
        if ord(character) in (0, 0xFFFD) or is_control(character):
            continue
        output.append(" " if is_whitespace(character) else character)
    return "".join(output)


def chinese_apart(text):
    output = []
    for character in text:
        output.extend([" ", character, " "] if is_chinese(character) else [character])
    return "".join(output)


def without_accents(word):
    output = []
    for character in unicodedata.normalize("NFD", word):
        if unicodedata.category(character) != "Mn":
            output.append(character)
    return "".join(output)


def split_on_punctuation(word):
    output, new_word = [], True
    for character in list(word):
        if is_punctuation(character):
            output.append([character])
            new_word = True
        else:
            if new_word:
                output.append([])
            new_word = False
            output[-1].append(character)
    return ["".join(part) for part in output]


def plain_words(text):
    """Return lowercase words and punctuation."""
    words = []
    for word in chinese_apart(cleaned(text)).strip().split():
        words.extend(split_on_punctuation(without_accents(word.lower())))
    return " ".join(words).split()


def plain_pieces(word, index):
    """Split a word greedily by longest match."""
    characters = list(word)
    if len(characters) > 100:
        return ["[UNK]"]
    pieces, start = [], 0
    while start < len(characters):
        end, match = len(characters), None
        while start < end:
            piece = "".join(characters[start:end])
            if start > 0:
                piece = "##" + piece
            if piece in index:
                match = piece
                break
            end -= 1
        if match is None:
            return ["[UNK]"]
        pieces.append(match)
        start = end
    return pieces


def plain_instances(documents, tokens, rng):
    for number, document in enumerate(documents):
        room = tokens - 3
        target = rng.randint(2, room) if rng.random() < 0.1 else room
        chunk, length, i = [], 0, 0
        while i < len(document):
            chunk.append(document[i])
            length += len(document[i])
            if i == len(document) - 1 or length >= target:
                a_end = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
                a = [token for sentence in chunk[:a_end] for token in sentence]
                b, label = [], 0
                if len(chunk) == 1 or rng.random() < 0.5:
                    label = 1
                    other = number
                    while other == number:
                        other = rng.randint(0, len(documents) - 1)
                    start = rng.randint(0, len(documents[other]) - 1)
                    for sentence in documents[other][start:]:
                        b.extend(sentence)
                        if len(b) >= target - len(a):
                            break
                    i -= len(chunk) - a_end
                else:
                    for sentence in chunk[a_end:]:
                        b.extend(sentence)
                while len(a) + len(b) > room:
                    longer = a if len(a) > len(b) else b
                    if rng.random() < 0.5:
                        del longer[0]
                    else:
                        longer.pop()
                yield (
                    ["[CLS]", *a, "[SEP]", *b, "[SEP]"],
                    [0] * (len(a) + 2) + [1] * (len(b) + 1),
                    label,
                )
                chunk, length = [], 0
            i += 1


def plain(documents, vocabulary, tokens=128):
    """Convert sentences to padded ids in memory, and return the number of instances."""
    index = vocabulary.index
    tokenized = []
    for document in documents:
        sentences = []
        for sentence in document:
            pieces = []
            for word in plain_words(sentence):
                pieces.extend(plain_pieces(word, index))
            if pieces:
                sentences.append(pieces)
        if sentences:
            tokenized.append(sentences)
    written = io.BytesIO()
    count = 0
    for pieces, segments, label in plain_instances(tokenized, tokens, random.Random(0)):
        ids = [index[piece] for piece in pieces]
        ids += [0] * (tokens - len(ids))
        record = {"ids": ids, "segments": segments, "label": label}
        written.write(json.dumps(record).encode())
        count += 1
    return count


# Measuring.


def documents_of(path):
    source = corpus.parse_source(str(path))
    return list(corpus.read(source, corpus.Report()))


def cost(function):
    """Return wall-clock and CPU seconds, including child processes."""
    clock, processors = time.perf_counter(), sum(os.times()[:4])
    function()
    return time.perf_counter() - clock, sum(os.times()[:4]) - processors


def quietly(function, *arguments, **settings):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*arguments, **settings)


def measure_speed(text, vocab, rounds):
    vocabulary = wordpiece.load(vocab)
    megabytes = text.stat().st_size / 1e6
    documents = documents_of(text)
    paragraphs = [line for document in documents for line in document.text.split("\n")]
    sentences = [split_sentences(document) for document in documents]
    flat = [sentence for document in sentences for sentence in document]
    part, size = [], 0
    for document in sentences:
        part.append(document)
        size += sum(len(sentence.encode()) for sentence in document)
        if size >= PLAIN_BYTES and len(part) > 1:
            break
    tokenizer = vocabulary.tokenizer()

    def tokenize(method, texts):
        return lambda: getattr(tokenizer, method)(texts, add_special_tokens=False)

    candidates = {
        "tokenizer, paragraphs": (megabytes, tokenize("encode_batch", paragraphs)),
        "tokenizer, paragraphs, fast": (megabytes, tokenize("encode_batch_fast", paragraphs)),
        "tokenizer, sentences": (megabytes, tokenize("encode_batch", flat)),
        "tokenizer, sentences, fast": (megabytes, tokenize("encode_batch_fast", flat)),
        "plain Python": (size / 1e6, lambda: plain(part, vocabulary)),
        "prepare": (megabytes, None),
    }
    speeds = {name: [] for name in candidates}
    efforts = {name: [] for name in candidates}
    loads = []
    for _ in range(rounds):
        for name, (amount, function) in candidates.items():
            loads.append(os.getloadavg()[0])
            if function is None:
                with tempfile.TemporaryDirectory() as out:
                    command = [sys.executable, __file__, "--once", out]
                    command += ["--text", str(text), "--vocab", str(vocab)]
                    taken, effort = cost(lambda c=command: subprocess.run(c, check=True, capture_output=True))  # fmt: skip
            else:
                taken, effort = cost(function)
            speeds[name].append(amount / taken)
            efforts[name].append(effort / amount)
    return {
        "what": "speed",
        "megabytes": round(megabytes, 2),
        "load_average": [round(min(loads), 2), round(max(loads), 2)],
        "megabytes_per_second": {k: [round(x, 4) for x in v] for k, v in speeds.items()},
        "processor_seconds_per_megabyte": {k: [round(x, 4) for x in v] for k, v in efforts.items()},
    }


def peak_memory(command):
    """Return the peak resident memory in MB of a command and of its largest child."""
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parent = worker = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            parent = max(parent, process.memory_info().rss)
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    worker = max(worker, child.memory_info().rss)
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{command} failed")
    return round(parent / 1e6, 1), round(worker / 1e6, 1)


def measure_memory(text, vocab):
    """Measure the peak memory on the text and on a tenth of it."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        lines = text.read_text().splitlines(keepends=True)
        tenth = pathlib.Path(folder) / "tenth.txt"
        tenth.write_text("".join(lines[: len(lines) // 10]))
        for name, path in (("1x", tenth), ("10x", text)):
            command = [sys.executable, __file__, "--once", f"{folder}/{name}"]
            command += ["--vocab", str(vocab), "--text", str(path)]
            parent, worker = peak_memory(command)
            megabytes = round(path.stat().st_size / 1e6, 2)
            results[name] = {"megabytes": megabytes, "parent_mb": parent, "worker_mb": worker}
    return {"what": "memory", **results}


def measure_fill(text, vocab):
    fill = {}
    for tokens, sequences, pairs in ((128, 1, "nsp"), (128, 4, "nsp"), (512, 1, "nsp"),
                                     (512, 16, "nsp"), (512, 16, "none")):  # fmt: skip
        with tempfile.TemporaryDirectory() as out:
            settings = {"tokens": tokens, "sequences": sequences, "pairs": pairs}
            manifest = quietly(prepare, [str(text)], vocab, out, **settings)
        fill[f"T={tokens} S={sequences} {pairs}"] = round(manifest.train.fill_fraction, 4)
    return {"what": "fill", "megabytes": round(text.stat().st_size / 1e6, 2), "fill": fill}


BEAM = {
    "local": [],
    "Beam, in this process": ["--runner", "beam"],
    "Beam, 2 threads": ["--runner", "beam", "--beam", "direct_num_workers=2",
                        "--beam", "direct_running_mode=multi_threading"],
    "Beam, 2 processes": ["--runner", "beam", "--beam", "direct_num_workers=2",
                          "--beam", "direct_running_mode=multi_processing"],
}  # fmt: skip


def measure_beam(text, vocab, parts=8):
    """Prepare the same rows with both runners, and compare their bytes.

    Each file is a source, because small files of one source are read together.
    """
    same_bytes = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        documents = text.read_text().split("\n\n")
        size = -(-len(documents) // parts)
        sources = []
        for i in range(0, len(documents), size):
            sources.append(folder / f"{i:09}.txt")
            sources[-1].write_text("\n\n".join(documents[i : i + size]) + "\n")
        contents = {}
        for name, options in BEAM.items():
            out = folder / name
            command = [sys.executable, "-c", "from bert_jax.cli import console; console()"]
            command += ["prepare", *map(str, sources), "--vocab", str(vocab), "--out", str(out)]
            command += ["--sequences", "4", *options]
            subprocess.run(command, check=True, capture_output=True)
            content = {path.name: path.read_bytes() for path in out.iterdir()}
            contents[name] = content
            shards = sum(file.endswith(".arrayrecord") for file in content)
            same_bytes[name] = content == contents["local"]
    return {"what": "beam", "batches": len(sources), "shards": shards, "same_bytes": same_bytes}


def spread(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def readme(results):
    lines = [
        "# prepare: text to rows",
        "",
        "Written by `benchmark.py` from results.jsonl; its docstring describes how to run it.",
        "[experiments/speed](../README.md) compares `prepare` with datasets.",
    ]
    for result in results:
        title = f"{result['what'].capitalize()}, {result['text']}, {result['machine']}"
        lines += ["", f"## {title}", ""]
        if result["what"] == "speed":
            speeds = result["megabytes_per_second"]
            efforts = result["processor_seconds_per_megabyte"]
            fastest = max(
                (name for name in speeds if name.startswith("tokenizer")),
                key=lambda name: statistics.median(speeds[name]),
            )
            lines += [
                f"{result['megabytes']} MB of text, {len(speeds['prepare'])} rounds in which the "
                "candidates take turns. Medians and ranges. The load average was "
                f"{result['load_average'][0]} to {result['load_average'][1]}; above the number of "
                "cores, other work slows all candidates.",
                "",
                "| | MB/s | processor seconds per MB |",
                "|---|---|---|",
            ]
            lines += [f"| {n} | {spread(speeds[n])} | {spread(efforts[n])} |" for n in speeds]
            by_clock, by_effort = (
                {n: statistics.median(v) for n, v in table.items()} for table in (speeds, efforts)
            )
            rounds = [a / b for a, b in zip(speeds["prepare"], speeds[fastest], strict=True)]
            lines += [
                "",
                "`prepare`, from the file to the manifest, has "
                f"{by_clock['prepare'] / by_clock[fastest]:.0%} of the throughput of the fastest "
                f"tokenizer call ({min(rounds):.0%} to {max(rounds):.0%} in single rounds; "
                f"{by_effort[fastest] / by_effort['prepare']:.0%} per processor "
                f"second) and {by_clock['prepare'] / by_clock['plain Python']:.1f} times that of "
                f"plain Python on one core ({by_effort['plain Python'] / by_effort['prepare']:.1f} "
                "times per processor second).",
            ]
        elif result["what"] == "memory":
            lines += ["Peak resident memory in MB.", "", "| text | parent | largest worker |", "|---|---|---|"]  # fmt: skip
            lines += [
                f"| {r['megabytes']} MB | {r['parent_mb']} | {r['worker_mb']} |"
                for r in (result["1x"], result["10x"])
            ]
        elif result["what"] == "beam":
            lines += [
                f"{result['batches']} files, tokenized separately, and {result['shards']} shards.",
                "",
                "| | same bytes as the local runner |",
                "|---|---|",
            ]
            lines += [
                f"| {name} | {'yes' if same else 'NO'} |"
                for name, same in result["same_bytes"].items()
            ]
        else:
            lines += ["| setting | real tokens / tokens of rows |", "|---|---|"]
            lines += [f"| {name} | {fill:.1%} |" for name, fill in result["fill"].items()]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=pathlib.Path, required=True, help="an uncompressed file")
    parser.add_argument("--vocab", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--beam", action="store_true")
    parser.add_argument("--once", metavar="OUT", help="only run prepare (used internally)")
    arguments = parser.parse_args()
    if arguments.once:
        prepare([str(arguments.text)], arguments.vocab, arguments.once)
        return
    if arguments.memory:
        result = measure_memory(arguments.text, arguments.vocab)
    elif arguments.beam:
        result = measure_beam(arguments.text, arguments.vocab)
    elif arguments.fill:
        result = measure_fill(arguments.text, arguments.vocab)
    else:
        result = measure_speed(arguments.text, arguments.vocab, arguments.rounds)
    result["text"] = arguments.text.name
    result["machine"] = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    path = HERE / "results.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps(result) + "\n")
    results = [json.loads(line) for line in path.read_text().splitlines()]
    (HERE / "README.md").write_text(readme(results))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
