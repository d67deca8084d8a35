"""Table 7: fine-tuning and the feature-based approach on named-entity recognition."""

import recipes

from bert_jax.tools.sweep.experiment import Claim, Column, Table

FEATURES = {
    "embeddings": "embeddings",
    "second-to-last": "second-to-last layer",
    "last": "last layer",
    "weighted-last4": "weighted last four",
    "last4": "concatenated last four",
    "weighted-all": "weighted all",
}
NUMBERS = (91.0, 95.6, 94.9, 95.9, 96.1, 95.5)
PAPER = {
    "base, fine-tuned": {"dev": 96.4, "test": 92.4},
    "large, fine-tuned": {"dev": 96.6, "test": 92.8},
    **{
        f"base, {name}": {"dev": value}
        for name, value in zip(FEATURES.values(), NUMBERS, strict=True)
    },
}
FINE_TUNED = "fine-tuned"


def features_of(model):
    """Return the features to evaluate: none of large, as in the paper, or of random weights."""
    if model == recipes.RANDOM or "large" in model:
        return {}
    names = dict(FEATURES)
    if model == recipes.MINI:  # it has only four layers
        del names["weighted-all"]
    return names


def get_points(args):
    """Return the fine-tuning of each model, and two-layer BiLSTMs on its frozen features."""
    for model, start in recipes.starts(args, capitals=True).items():
        yield recipes.finetuned(args, model, start, "NER", more=FINE_TUNED, features=FINE_TUNED)
        for features, name in features_of(model).items():
            changes = recipes.LSTM | {"model.head.features": features}
            yield recipes.finetuned(args, model, start, "NER", changes, features, features=name)


def get_blocks(results):
    """Return the table of F1 on the dev and test set, and the paper's order of features as claims."""

    def table_and_claims(scale):
        first, other = recipes.USUAL[scale]
        splits = ("dev",) if scale == "small" else ("dev", "test")
        columns = {split: Column(f"{split}.f1") for split in splits}
        rows, paper = {}, {}
        for model in recipes.models(results, scale, first, other):
            for name in (FINE_TUNED, *features_of(model).values()):
                rows[f"{model}, {name}"] = {"model": model, "features": name}
                for size in recipes.sizes([model]).values():
                    paper[f"{model}, {name}"] = PAPER.get(f"{size}, {name}", {})
        best = f"{first}, {FEATURES['last4']}"
        claims = [
            Claim("dev", best, f"{first}, {FEATURES[name]}")
            for name in ("embeddings", "last", "second-to-last", "weighted-last4")
        ]
        return Table(rows, columns, paper, "model"), [
            Claim("dev", f"{first}, {FINE_TUNED}", best),
            *claims,
        ]

    larger = recipes.larger({"WNUT-17, F1 on dev": "wnut17"})
    return recipes.page(table_and_claims) | {"larger": larger}
