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


def ours(function: str, **settings: Any) -> Contender:
    """Return a contender of this project."""
    return Contender(f"ours:{function}", settings)


def peers(function: str, **settings: Any) -> Contender:
    """Return a contender of another project."""
    return Contender(f"peers:{function}", settings)


def quick(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a minimal turn, for a smoke test."""
    limits = {"steps": 2, "batch": 2, "texts": 30}
    reduced = {k: min(v, limits[k]) if k in limits else v for k, v in settings.items()}
    if reduced.get("size") in ("mini", "base"):
        reduced["size"] = "tiny"
    return reduced


# Maximum number of sequences per packed row, by T.
SEQUENCES = {128: 4, 512: 16}
# Tokens per step, and steps per turn, such that a turn takes a few seconds on two cores.
PRETRAIN = {"teaching": (4096, 4), "mini": (4096, 2), "base": (2048, 1)}
FINETUNE = {"sst2": 10, "clinc150": 10, "qnli": 4, "squad1": 2}


def _pretrain(size: str, tokens: int) -> dict[str, Contender]:
    batch_tokens, steps = PRETRAIN[size]
    common = {"size": size, "tokens": tokens, "batch": batch_tokens // tokens, "steps": steps}
    padded, packed = {**common, "sequences": 1}, {**common, "sequences": SEQUENCES[tokens]}
    contenders = {
        "bert_jax": ours("pretrain", **packed),
        "bert_jax, padded": ours("pretrain", **padded),
        "transformers": peers("pretrain", **padded),
        "torch.compile": peers("pretrain", **padded, compiled=True),
        "gathered": peers("pretrain", **padded, gathered=True),
        "gathered, packed": peers("pretrain", **packed, gathered=True),
    }
    if size == "base":  # each contender uses about four gigabytes of memory
        del contenders["bert_jax, padded"], contenders["gathered"]
        return contenders
    compiled = peers("pretrain", **packed, gathered=True, compiled=True)
    return {**contenders, "gathered, packed, torch.compile": compiled}


def _finetune(name: str) -> dict[str, Contender]:
    settings = {"name": name, "steps": FINETUNE[name]}
    return {
        "packed": ours("finetune", **settings, one_a_row=False),
        "padded": ours("finetune", **settings, one_a_row=True),
        "trainer": peers("finetune", **settings, grouped=False),
        "grouped": peers("finetune", **settings, grouped=True),
    }


START = {"size": "base", "tokens": 128, "batch": 16}
TRANSFORMERS = "from transformers.cli.transformers import main; main()"
# Contenders by case; the first of each is the reference.
CASES = {
    **{
        f"pretrain-{size}-{tokens}": _pretrain(size, tokens)
        for size in PRETRAIN
        for tokens in SEQUENCES
    },
    **{f"finetune-{name}": _finetune(name) for name in FINETUNE},
    "embed": {
        "packed": ours("embed", texts=360),
        "transformers": peers("embed", texts=360, by_length=False),
        "sorted": peers("embed", texts=360, by_length=True),
    },
    "prepare": {
        "prepare": ours("prepare", pairs="nsp"),
        "prepare, no pairs": ours("prepare", pairs="none"),
        "datasets": peers("prepare"),
    },
    "loader": {
        "loader": ours("loader", tokens=128, sequences=4, batch=256, steps=1000),
        "DataLoader": peers("loader", tokens=128, batch=256, steps=20),
    },
    "save": {
        "checkpoint": ours("save", size="base"),
        "torch.save": peers("save", size="base"),
    },
    "restore": {
        "checkpoint": ours("restore", size="base"),
        "torch.load": peers("restore", size="base"),
    },
    "start": {
        "cached": ours("start", **START, sequences=4, cached=True),
        "cold": ours("start", **START, sequences=4, cached=False),
        "transformers": peers("start", **START, compiled=False, cached=True),
        "torch.compile, cached": peers("start", **START, compiled=True, cached=True),
        "torch.compile, cold": peers("start", **START, compiled=True, cached=False),
    },
    "help": {
        "bert-jax --help": ours("command", arguments=["-m", "bert_jax", "--help"]),
        "transformers --help": ours("command", arguments=["-c", TRANSFORMERS, "--help"]),
        "python alone": ours("command", arguments=["-c", "pass"]),
    },
}
# The count whose rate is compared, by case or its first word; "seconds" if a turn is a single operation.
# Cases without contenders are recorded, and not run again.
MEASURES = {
    "pretrain": "real_tokens",
    "finetune": "examples",
    "embed": "texts",
    "prepare": "text_bytes",
    "loader": "rows",
    "save": "bytes",
    "restore": "bytes",
    "start": "seconds",
    "help": "seconds",
    "storage-read": "rows",
    **dict.fromkeys(("storage-save", "stall", "host", "memory", "products"), "steps"),
    **dict.fromkeys(("layers", "dropout", "activation"), "steps"),
}


def measure(case: str) -> str:
    """Return the count whose rate is compared in a case."""
    return MEASURES.get(case) or MEASURES[case.partition("-")[0]]
