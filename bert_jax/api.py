"""The Python API: `bert_jax.load`, `bert_jax.pretrain` and `bert_jax.finetune`.

Examples:
    >>> import bert_jax
    >>> model = bert_jax.load(example_run())
    >>> model.fill_mask("The [MASK] runs.")[0][0].token in model.vocabulary.tokens
    True

    A model's parameters and its pure function are JAX's own, so any training loop can use them:

    >>> import jax
    >>> inputs = model.encode(["The river runs.", "It turns."])
    >>> model.apply(model.params, inputs).hidden.shape
    (2, 8, 16)
    >>> grads = jax.grad(lambda params: model.apply(params, inputs).hidden.sum())(model.params)
"""

import contextlib
import copy
import dataclasses
import filecmp
import functools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from bert_jax import storage, train
from bert_jax.config import flags
from bert_jax.config.checks import validate
from bert_jax.config.model import HEADS
from bert_jax.config.schema import Config, FinetuneConfig, TrainConfig, take_rows
from bert_jax.convert import source as source_lib
from bert_jax.convert.export import export
from bert_jax.data import wordpiece
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import shape_repr
from bert_jax.data.vocabulary import VOCAB, Vocabulary
from bert_jax.errors import UserError
from bert_jax.inference import predict
from bert_jax.inference.attention_maps import AttentionMapper, AttentionMaps
from bert_jax.inference.embed import Embedder
from bert_jax.inference.fill_mask import Candidate, Inputs, MaskFiller, inputs_of
from bert_jax.inference.sentence_scores import SentenceScorer, TokenScore
from bert_jax.model.bert import Bert, Params
from bert_jax.objectives import pretraining, warm_start
from bert_jax.runtime import device
from bert_jax.storage import files
from bert_jax.tasks.base import NEW, Prediction, Text

if TYPE_CHECKING:
    import tokenizers


# Options of the command line in errors, in Python; commands stay as they are.
_OPTION = re.compile(
    r"bert-jax [^`]*|--config\.(?P<key>[\w.\[\]]+)(=(?P<value>[\w.]+))?"
    r"|--(?P<name>\w+)((?<=config|.vocab) | (?=none|[A-Z]{2}))?"
)
_PHRASES = {
    "replace them with --force": "remove it",
    "--pairs none": "changes={'model.next_sentence': False}",
    "--config.task.train=FILE, and --config.task.dev=FILE": "examples={'train': …, 'dev': …}",
    "--resume=force": "force=True",
    "--teacher ": "distill.teacher=",
}


@contextlib.contextmanager
def _python_names(phrases: Mapping[str, str] = _PHRASES) -> Iterator[None]:
    """Let errors name the arguments of functions, not the options of the command line."""

    def argument(match: re.Match) -> str:
        if match["key"]:
            return f"changes={{{match['key']!r}: {match['value'] or '…'}}}"
        return f"{match['name']}=" if match["name"] else match[0]

    try:
        yield
    except UserError as error:
        text = str(error)
        for option, words in phrases.items():
            text = text.replace(option, words)
        error.args = (_OPTION.sub(argument, text),)
        raise


class Output(NamedTuple):
    """Outputs of `Model.apply` for N texts of T tokens. Under `jax.jit`, unused ones cost nothing.

    Attributes:
        hidden: hidden states of the last layer.
        pooled: output of the pooler, of [CLS] or, in causal models, the last token; None without one.
        masked_lm: logits over the vocabulary at every token; None without that head.
        next_sentence: logits of "is next" and "is random"; None without that head.
        head: logits of the fine-tuned head, [N, C] or for tokens [N, T, C]; None without one.
    """

    hidden: Float[Array, "N T D"]
    pooled: Float[Array, "N D"] | None
    masked_lm: Float[Array, "N T V"] | None
    next_sentence: Float[Array, "N 2"] | None
    head: Float[Array, "N ..."] | None

    __repr__ = shape_repr


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model. `dataclasses.replace(model, params=…)` has other parameters.

    Attributes:
        source: where it was loaded from.
        checkpoint: which checkpoint of a run.
        config: config of the run, or of the imported model.
        vocabulary: its vocabulary: WordPiece, byte-level BPE or SentencePiece.
        params: the parameters, a tree of arrays.
        step: training step of the checkpoint; 0 unless the source is a run.
    """

    source: str
    checkpoint: str
    config: TrainConfig
    vocabulary: Vocabulary
    params: Params
    step: int

    def __repr__(self) -> str:
        size = self.config.model
        return f"Model({self.source!r}, L{size.layers}-H{size.hidden}-A{size.heads}, step {self.step:,})"

    @property
    def tokenizer(self) -> "tokenizers.Tokenizer":
        """The tokenizer, an object of Hugging Face's `tokenizers`."""
        return self.vocabulary.tokenizer()

    @functools.cached_property
    def _tools(self) -> dict[Any, Any]:
        return {}

    def _tool(self, kind: Callable[[source_lib.OpenModel], Any]) -> Any:
        """Return the object of a class of `inference`, made at its first use."""
        if kind not in self._tools:
            self._tools[kind] = kind(self._opened())
        return self._tools[kind]

    def _opened(self) -> source_lib.OpenModel:
        return source_lib.OpenModel(self.config, self.vocabulary, self.params, self.step)

    def encode(self, texts: Sequence[Text]) -> Inputs:
        """Tokenize N texts, or pairs of texts, into inputs of `apply`, one text per row.

        "[MASK]" is read as the mask token. T is a power of two, at most the number of positions.
        """
        _require_list("encode", texts)
        return inputs_of(self.vocabulary, texts, self.config.model.positions)

    def apply(self, params: Params, inputs: Inputs, key: Key[Array, ""] | None = None) -> Output:
        """Run the model: a pure function to use in `jax.jit`, `jax.grad` and `jax.vmap`.

        Args:
            params: parameters of the structure of `self.params`.
            inputs: what `encode` returns.
            key: key of dropout; None for none.
        """
        return self._apply(params, *inputs, key)

    @functools.cached_property
    def _apply(self) -> Callable[..., Output]:
        model = Bert(self.config.model)

        def apply(params, tokens, layout, key) -> Output:
            outputs: Any = model.apply({"params": params}, tokens, layout, key=key)
            values = {name: getattr(outputs, name) for name in Output._fields}
            for name in (
                "pooled",
                "next_sentence",
                *["head"] * HEADS[model.config.head.kind].pooled,
            ):
                if values[name] is not None:
                    values[name] = values[name][:, 0]  # one sequence per row
            return Output(**values)

        return jax.jit(apply)

    @overload
    def fill_mask(self, text: str, top: int = 5) -> list[list[Candidate]]: ...
    @overload
    def fill_mask(self, text: Iterable[str], top: int = 5) -> list[list[list[Candidate]]]: ...
    def fill_mask(self, text: str | Iterable[str], top: int = 5) -> list[Any]:
        """Return the `top` candidates, (token, probability), for each [MASK] of a text, or of each text."""
        fill = self._tool(MaskFiller)
        return fill(text, top) if isinstance(text, str) else [fill(each, top) for each in text]

    def attention(self, text: str, text_b: str | None = None) -> AttentionMaps:
        """Return the attention probabilities of all layers and heads in a text or a pair."""
        return self._tool(AttentionMapper)(text, text_b)

    def score(self, texts: Sequence[str], pll: str = "original") -> Float[np.ndarray, " N"]:
        """Return the scores of N texts in nats: their (pseudo-)log-likelihoods.

        The score is the sum of the log-probabilities of a text's word pieces, each masked in turn;
        of a left-to-right model, each given those before it (see `sentence_scores.SentenceScorer`).

        Args:
            texts: the texts.
            pll: "original", or "word-l2r" to mask the rest of a word together with a piece.
        """
        _require_list("score", texts)
        return self._tool(SentenceScorer)(texts, pll=pll)

    def score_tokens(self, texts: Sequence[str], pll: str = "original") -> list[list[TokenScore]]:
        """Return (token, log_probability) for each word piece of each text; see `score`."""
        _require_list("score_tokens", texts)
        return self._tool(SentenceScorer).tokens(texts, pll)

    @_python_names({"config.embed.": ""})
    def embed(self, texts: Iterable[str], **settings: Any) -> Any:
        """Return vectors of texts.

        Args:
            texts: the texts.
            settings: fields of `EmbedConfig` (pooling, layers, normalize, tokens, prompt, include_prompt,
                truncate_dim), and long, overlap_tokens and weights as for `Embedder`.

        Returns:
            [N, D]; with pooling="none" a list of [tokens, D].
        """
        _require_list("embed", texts)
        fields = {field.name for field in dataclasses.fields(self.config.embed)}
        embed = {name: settings.pop(name) for name in fields & settings.keys()}
        config = dataclasses.replace(
            self.config, embed=dataclasses.replace(self.config.embed, **embed)
        )
        key = repr((config.embed, sorted(settings.items())))
        if key not in self._tools:
            self._tools[key] = Embedder(config, self.vocabulary, self.params, **settings)
        embedder = self._tools[key]
        vectors = list(embedder(texts))
        if config.embed.pooling == "none":
            return vectors
        return np.array(vectors, np.float32).reshape(-1, embedder.dimension)

    def predict(self, texts: Sequence[Text]) -> list[Prediction]:
        """Return the predictions of a fine-tuned model.

        Args:
            texts: texts or pairs of texts; for tagging, texts of words separated by spaces; for
                SQuAD, pairs of a question and a context.
        """
        _require_list("predict", texts)
        config = self.config
        if isinstance(config, FinetuneConfig) and config.task.kind in ("choice", "pairs"):
            raise UserError(
                f"{self.source} does not predict from texts: use `bert-jax predict` for multiple choice, "
                "and `embed` for a model of pairs"
            )
        if not texts:
            return []
        # Lone surrogates cannot be encoded.
        valid = [jax.tree.map(lambda x: x.encode(errors="replace").decode(), x) for x in texts]
        dataset, logits = predict.predict_new(self._opened(), valid, self.source)
        return dataset.predictions(NEW, logits)

    def save(self, folder: str | os.PathLike) -> None:
        """Write config, vocabulary and parameters to a new folder, which `load` accepts.

        The metrics of a fine-tuned model are copied, as they have the threshold of SQuAD 2.0.
        """
        about = {"source": self.source, "format": "bert_jax", "official": None}
        source_lib.write(
            source_lib.Imported(self.config, self.vocabulary, jax.device_get(self.params), about),
            folder,
        )
        if metrics := predict.read_metrics(self.source, self.step):
            files.write_json(pathlib.Path(folder) / predict.METRICS, {**metrics, "step": 0})

    def to_huggingface(self, folder: str | os.PathLike, heads: str = "all") -> None:
        """Write a new folder that transformers' `from_pretrained` loads.

        Args:
            folder: path of the new folder.
            heads: "all", "masked_lm" or "none": see `convert.export.export`.
        """
        export(self.source, str(folder), self.checkpoint, heads, params=self.params)


@_python_names()
def load(source: str | os.PathLike, checkpoint: str = "best") -> Model:
    """Load a model.

    Args:
        source: a run, an imported checkpoint, a Hugging Face folder, a name on the hub such as
            "bert-base-uncased", or a TensorFlow 1 release.
        checkpoint: of a run: "best", "latest" or a step number.
    """
    return Model(str(source), str(checkpoint), *source_lib.open_model(str(source), str(checkpoint)))


def mteb(model: Model, prompts: Mapping[str, str] = MappingProxyType({}), **settings: Any) -> Any:
    """Return a model for `mteb.evaluate(bert_jax.mteb(model), tasks)`; needs the extra `mteb`.

    Args:
        model: the model.
        prompts: what is put before "query" and "document" texts of retrieval, such as
            {"query": "query: ", "document": "passage: "} for E5.
        settings: as for `Model.embed`.
    """
    from bert_jax.inference.mteb_encoder import MtebEncoder

    return MtebEncoder(functools.partial(model.embed, **settings), model.source, prompts)


@_python_names()
def pretrain(
    config: str | Config,
    workdir: str | os.PathLike,
    texts: Iterable[str] | None = None,
    *,
    rows: Sequence[str | os.PathLike] = (),
    vocab: str | os.PathLike = "",
    vocab_size: int = 8_192,
    objective: Callable[..., Any] | None = None,
    init: str | os.PathLike = "",
    checkpoint: str = "best",
    changes: dict[str, Any] | None = None,
    force: bool = False,
    save_on_signal: bool = False,
) -> Model:
    """Pretrain a model, or resume, and return the best checkpoint.

    Unlike `bert-jax pretrain`, it changes nothing of the process. Call
    `bert_jax.runtime.device.start("", deterministic=True)` before JAX is used to get what the command
    line sets: the compilation cache, flags for speed on CPUs, and the deterministic kernels that a
    config asks for on GPUs unless `deterministic` is false.

    Args:
        config: a config, or its name as for `--config`: "mini,128".
        workdir: folder of the run.
        texts: documents, each a text with one paragraph or sentence per line. They are written to
            `workdir/data`, with the vocabulary and the rows. To resume, pass them again or not; others
            are refused. Not with a workdir on object storage.
        rows: instead of texts, folders of rows, one per phase; "A=0.7,B=0.3" mixes two.
        vocab: folder of a vocabulary for the texts; "" takes that of `init`, or trains one.
        vocab_size: size of the vocabulary to train.
        objective: class of an `Objective` with the constructor of `objectives.masked_lm.MaskedLM`,
            which it replaces. Its name is recorded; `evaluate` uses the default one.
        init: a source of `load` whose weights the model starts from; its architecture, vocabulary
            and positions are those of the source. "" for random weights.
        checkpoint: of `init`, if it is a run.
        changes: settings by key: `{"optim.learning_rate": 5e-4}`.
        force: resume even if the config differs from the run's.
        save_on_signal: handle SIGTERM and SIGINT (Ctrl-C) while training, in the main thread: save, and
            raise `Interrupted`.
    """
    _require_list("pretrain", texts)
    if texts is not None and storage.is_remote(workdir):
        raise UserError(
            f"{workdir}: texts need a local workdir: prepare rows with `bert-jax prepare` and pass rows="
        )
    if rows and (texts is not None or vocab):
        raise UserError(
            "pretrain(): rows already contain texts and a vocabulary: pass rows without texts and vocab"
        )
    settings = _config(config, changes, Config)
    device.check(settings, jax.default_backend())  # before rows are prepared
    folders = [str(folder) for folder in rows]
    data = pathlib.Path(workdir) / "data"
    if not folders and (texts is not None or (data / "text.jsonl").exists()):
        vocabulary = str(vocab) or (source_lib.open_vocabulary(str(init)) if init else "")
        with files.lock_folder(workdir):
            folders = _make_rows(settings, data, texts, vocabulary, vocab_size)
    take_rows(settings, folders)
    start = None
    if init:
        keys = set(changes or {}) if isinstance(config, str) else None
        settings, start = warm_start.open_start(settings, str(init), str(checkpoint), keys)
    elif settings.init_scheme:
        raise UserError(f"config.init_scheme={settings.init_scheme}: it needs init")
    train.train(
        *pretraining.make_phases(settings, objective, start, workdir),
        str(workdir),
        force=force,
        start=start.params if start else None,
        save_on_signal=save_on_signal,
    )
    return load(workdir)


@_python_names()
def finetune(
    config: str | FinetuneConfig,
    init: str | os.PathLike,
    workdir: str | os.PathLike,
    examples: dict[str, Iterable[dict[str, Any]]] | None = None,
    *,
    seeds: int = 1,
    vocab: str | os.PathLike = "",
    changes: dict[str, Any] | None = None,
    force: bool = False,
    save_on_signal: bool = False,
) -> dict[str, Any]:
    """Fine-tune a model, or resume, and return its metrics by split.

    Like `pretrain`, it changes nothing of the process.

    Args:
        config: a config, or its name as for `--config`: "table", "glue:rte".
        init: a source of `load`, or "none" for random parameters.
        workdir: folder of the run, which `load` opens.
        examples: rows of a table by split ("train", "dev", "test"), as dictionaries with the columns
            of `config.task`, by default "text" and "label". They are written to `workdir/data`. Not
            with a workdir on object storage.
        seeds: number of seeds.
        vocab: folder of a vocabulary, if `init` is "none".
        changes: settings by key: `{"epochs": 2}`.
        force, save_on_signal: as in `pretrain`.
    """
    if examples and storage.is_remote(workdir):
        raise UserError(
            f"{workdir}: examples need a local workdir: write them to files and name these in "
            "config.task"
        )
    if seeds < 1:
        raise UserError(f"finetune(): seeds is {seeds}: it must be at least 1")
    if unknown := set(examples or ()) - {"train", "dev", "test"}:
        raise UserError(
            f"finetune(): examples has the split {min(unknown)!r}: use train, dev and test"
        )
    settings = _config(config, changes, FinetuneConfig)
    device.check(settings, jax.default_backend())
    with files.lock_folder(workdir) if examples else contextlib.nullcontext():
        for split, records in (examples or {}).items():
            path = pathlib.Path(workdir) / "data" / f"{split}.jsonl"
            _write_lines(path, records)
            setattr(settings.task, split, str(path))
    return train.finetune(
        settings,
        str(init),
        str(workdir),
        seeds=seeds,
        vocab=str(vocab),
        force=force,
        keys=changes or (),
        save_on_signal=save_on_signal,
    )


def _require_list(function: str, texts: Any) -> None:
    if isinstance(texts, str):
        raise UserError(f"{function}(): texts is the string {texts[:40]!r}: pass a list of texts")


def _config(config: Any, changes: dict[str, Any] | None, kind: type) -> Any:
    if isinstance(config, str):
        settings = [f"--config.{key}={value}" for key, value in (changes or {}).items()]
        return flags.load([f"--config={config}", *settings], kind)
    if not isinstance(config, kind):
        raise UserError(
            f"config is a {type(config).__name__}: pass a {kind.__name__}, or the name of a config"
        )
    if changes:
        raise UserError("changes apply to the name of a config: set the fields of this one")
    validate(config)
    return copy.deepcopy(config)


def _make_rows(
    config: Config,
    data: pathlib.Path,
    texts: Iterable[str] | None,
    vocab: str | Vocabulary,
    vocab_size: int,
) -> list[str]:
    """Write texts, a vocabulary and the rows of every phase to a folder, unless they are there."""
    text = data / "text.jsonl"
    if texts is not None:
        _write_lines(text, ({"text": document} for document in texts))
    if not vocab:
        vocab = str(data / "vocab")
        if not (data / "vocab" / VOCAB).exists():
            wordpiece.train([str(text)], vocab, size=vocab_size, force=True)
    folders = []
    for phase in config.phases:
        tokens = phase.tokens or 128
        folders.append(str(data / f"rows{tokens}"))
        pairs = "nsp" if config.model.next_sentence else "none"
        sequences = max(tokens // 32, 1)
        # One process: a script that calls this need not be importable.
        prepare(
            [str(text)], vocab, folders[-1],
            tokens=tokens, sequences=sequences, pairs=pairs, workers=1,
        )  # fmt: skip
    return folders


def _write_lines(path: pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records to a file of `workdir/data`; refuse to change what rows or a run were made from."""
    with files.one_line_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as temporary:
            with temporary.open("w") as file:
                # NumPy's numbers are not JSON, but what `tolist` returns is.
                lines = (json.dumps(record, default=lambda x: x.tolist()) for record in records)
                file.writelines(f"{line}\n" for line in lines)
            if path.exists() and filecmp.cmp(path, temporary, shallow=False):
                shutil.copystat(path, temporary)  # `prepare` and its progress depend on the time
            elif path.exists() and _is_used(path):
                raise UserError(
                    f"{path} holds other data than those passed, and rows or a run were made from it: "
                    "pass the same data again, or choose another workdir"
                )


def _is_used(path: pathlib.Path) -> bool:
    """Whether rows or a run were made from a file of `workdir/data`."""
    folder = path.parents[1]
    configs = (*folder.glob("config.json"), *folder.glob("seed_*/config.json"))
    return any(configs) or any(x.is_dir() for x in path.parent.iterdir())
