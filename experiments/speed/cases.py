"""Cases of the benchmark, and the contenders of each, which take turns."""

from typing import Any, NamedTuple


class Contender(NamedTuple):
    """A contender of a case.

    Attributes:
        maker: MODULE:FUNCTION in this folder. The function takes the settings and returns the turn, a
            function without arguments that does the work and returns counts by name. The worker times
            it unless the counts include "seconds".
        settings: keyword arguments of the maker; `quick` reduces some of them for --quick.
    """

    maker: str
    settings: dict[str, Any]


class Case(NamedTuple):
    """A comparison of contenders on the same work; the first is the reference.

    Attributes:
        measure: name of the count whose rate is compared; "seconds" if a turn is a single operation.
        contenders: contenders by name.
    """

    measure: str
    contenders: dict[str, Contender]


def quick(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a minimal turn, for a smoke test."""
    limits = {"steps": 2, "batch": 2, "texts": 30}
    reduced = {k: min(v, limits[k]) if k in limits else v for k, v in settings.items()}
    if reduced.get("size") in ("mini", "base"):
        reduced["size"] = "tiny"
    return reduced


# Maximum number of sequences per packed row, by T.
SEQUENCES = {64: 2, 128: 4, 256: 8, 512: 16}
# Tokens per step, and steps per turn, such that a turn takes a few seconds on two cores.
PRETRAIN = {"teaching": (4096, 4), "mini": (4096, 2), "base": (2048, 1)}
FINETUNE = {"sst2": 10, "clinc150": 10, "qnli": 4, "squad1": 2}


def _pretrain(size: str, tokens: int) -> Case:
    batch_tokens, steps = PRETRAIN[size]
    common = {"size": size, "tokens": tokens, "batch": batch_tokens // tokens, "steps": steps}
    padded, packed = {**common, "sequences": 1}, {**common, "sequences": SEQUENCES[tokens]}
    peer = {"gathered": False, "compiled": False}
    contenders = {
        "bert_jax": Contender("ours:pretrain", packed),
        "bert_jax, padded": Contender("ours:pretrain", padded),
        "transformers": Contender("peers:pretrain", {**padded, **peer}),
        "torch.compile": Contender("peers:pretrain", {**padded, **peer, "compiled": True}),
        "gathered": Contender("peers:pretrain", {**padded, **peer, "gathered": True}),
        "gathered, packed": Contender("peers:pretrain", {**packed, **peer, "gathered": True}),
        "gathered, packed, torch.compile": Contender(
            "peers:pretrain", {**packed, "gathered": True, "compiled": True}
        ),
    }
    # Each contender of base uses about four gigabytes of memory.
    names = ("bert_jax", "transformers", "torch.compile", "gathered, packed")
    return Case(
        "real_tokens",
        {name: contenders[name] for name in (names if size == "base" else contenders)},
    )


def _finetune(name: str) -> Case:
    settings = {"name": name, "steps": FINETUNE[name]}
    return Case(
        "examples",
        {
            "packed": Contender("ours:finetune", {**settings, "one_a_row": False}),
            "padded": Contender("ours:finetune", {**settings, "one_a_row": True}),
            "trainer": Contender("peers:finetune", {**settings, "grouped": False}),
            "grouped": Contender("peers:finetune", {**settings, "grouped": True}),
        },
    )


# The step of the cases that vary one part or one size.
MINI = {"size": "mini", "tokens": 128, "sequences": 4, "batch": 16, "steps": 4}


def _mini(**changes: Any) -> Contender:
    return Contender("ours:pretrain", {**MINI, **changes})


def _settings(**changes: Any) -> Contender:
    return _mini(change=[f"model.{key}={value}" for key, value in changes.items()])


# The coordinate check of muP: hidden sizes, and what is measured at each.
MUP_WIDTHS = (64, 128, 256, 512)
MUP_PARTS = ("embeddings", "layer 1", "layer 2", "logits")
# The paper's recipe by T, and slices of 4, 16, 64, 256 and 1,024 TPUs.
RECIPE_STEPS = {128: 900_000, 512: 100_000}
SLICES = {
    "v5e": ("2x2", "4x4", "8x8", "16x16", "16x16,slices=4"),
    "v5p": ("2x2x1", "2x2x4", "4x4x4", "4x8x8", "8x8x16"),
    "v4": ("2x2x1", "2x2x4", "4x4x4", "4x8x8", "8x8x16"),
    "v6e": ("2x2", "4x4", "8x8", "16x16", "16x16,slices=4"),
}


def _tpu(topology: str) -> Case:
    contenders = {
        f"{size}, T={tokens}": Contender(
            "ours:tpu", {"model": size, "tokens": tokens, "topology": topology}
        )
        for size in ("base", "large")
        for tokens in RECIPE_STEPS
    }
    return Case("seconds", contenders)


BASE = {"size": "base", "tokens": 128, "sequences": 4, "batch": 16}


def _start(**options: bool) -> Contender:
    settings = {key: value for key, value in BASE.items() if key != "sequences"}
    return Contender("peers:start", {**settings, **options})


CASES = {
    **{
        f"pretrain-{size}-{tokens}": _pretrain(size, tokens)
        for size in PRETRAIN
        for tokens in (128, 512)
    },
    **{f"finetune-{name}": _finetune(name) for name in FINETUNE},
    "embed": Case(
        "texts",
        {
            "packed": Contender("ours:embed", {"texts": 360}),
            "transformers": Contender("peers:embed", {"texts": 360, "by_length": False}),
            "sorted": Contender("peers:embed", {"texts": 360, "by_length": True}),
        },
    ),
    "prepare": Case(
        "text_bytes",
        {
            "prepare": Contender("ours:prepare", {"pairs": "nsp"}),
            "prepare, no pairs": Contender("ours:prepare", {"pairs": "none"}),
            "datasets": Contender("peers:prepare", {}),
        },
    ),
    "fill": Case(
        "text_bytes",
        {
            f"T={tokens} S={sequences} {pairs}": Contender(
                "ours:prepare", {"pairs": pairs, "tokens": tokens, "sequences": sequences}
            )
            for tokens, sequences, pairs in (
                *((128, 1, "nsp"), (128, 4, "nsp"), (512, 1, "nsp")),
                *((512, 16, "nsp"), (512, 16, "none")),
            )
        },
    ),
    "loader": Case(
        "rows",
        {
            "loader": Contender(
                "ours:loader", {"tokens": 128, "sequences": 4, "batch": 256, "steps": 1000}
            ),
            "DataLoader": Contender("peers:loader", {"tokens": 128, "batch": 256, "steps": 20}),
        },
    ),
    "save": Case(
        "bytes",
        {
            "checkpoint": Contender("ours:save", {"size": "base"}),
            "torch.save": Contender("peers:save", {"size": "base"}),
        },
    ),
    "restore": Case(
        "bytes",
        {
            "checkpoint": Contender("ours:restore", {"size": "base"}),
            "torch.load": Contender("peers:restore", {"size": "base"}),
        },
    ),
    "stall": Case(
        "steps",
        {
            "steps": _mini(steps=10),
            "steps and a save": _mini(steps=10, saves=True),
        },
    ),
    "storage-read": Case(
        "rows",
        {
            name: Contender("ours:storage_read", {"scheme": scheme, "cached": cached, "steps": 40})
            for name, scheme, cached in (
                ("local", "", False),
                ("gs, by range", "gs", False),
                ("gs, cache", "gs", True),
                ("s3, by range", "s3", False),
                ("s3, cache", "s3", True),
            )
        },
    ),
    "storage-save": Case(
        "steps",
        {
            name: Contender("ours:storage_save", {"scheme": scheme, "steps": 400})
            for name, scheme in (("local", ""), ("gs", "gs"), ("s3", "s3"))
        },
    ),
    "start": Case(
        "seconds",
        {
            "cached": Contender("ours:start", {**BASE, "cached": True}),
            "cold": Contender("ours:start", {**BASE, "cached": False}),
            "transformers": _start(compiled=False, cached=True),
            "torch.compile, cached": _start(compiled=True, cached=True),
            "torch.compile, cold": _start(compiled=True, cached=False),
        },
    ),
    "help": Case(
        "seconds",
        {
            "bert-jax --help": Contender("ours:command", {"arguments": ["-m", "bert_jax", "--help"]}),
            "transformers --help": Contender(
                "ours:command",
                {"arguments": ["-c", "from transformers.cli.transformers import main; main()", "--help"]},
            ),
            "python alone": Contender("ours:command", {"arguments": ["-c", "pass"]}),
        },
    ),
    "host": Case(
        "steps",
        {
            "bert_jax": Contender("ours:host", {"steps": 2000}),
            "trainer": Contender("peers:host", {"steps": 500}),
        },
    ),
    "memory": Case("steps", {"kept": _mini(), "given back": _mini(keeps_memory=False)}),
    "products": Case("steps", {"Eigen": _mini(), "YNNPACK": _mini(fast_products=False)}),
    "layers": Case("steps", {name: _settings(layer_loop=name) for name in ("unrolled", "scanned")}),
    "dropout": Case(
        "steps",
        {
            **{name: _settings(dropout_generator=name) for name in ("hash", "threefry", "rbg")},
            "none": _settings(dropout=0.0, attention_dropout=0.0),
        },
    ),
    "activation": Case(
        "steps",
        {
            "gelu, 1 + erf": _settings(activation="gelu"),
            "gelu, erfc": _mini(erfc=True),
            "gelu_tanh": _settings(activation="gelu_tanh"),
        },
    ),
    "mup": Case(
        "seconds",
        {
            f"{kind}, {hidden}": Contender("ours:mup", {"hidden": hidden, "base": base})
            for kind, base in (("standard", 0), ("muP", MUP_WIDTHS[0]))
            for hidden in MUP_WIDTHS
        },
    ),
    **{f"tpu-{kind}:{shape}": _tpu(f"{kind}:{shape}") for kind in SLICES for shape in SLICES[kind]},
}  # fmt: skip
