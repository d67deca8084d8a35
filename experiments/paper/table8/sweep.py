"""Table 8: masking strategies: [MASK], the same token or a random token."""

import recipes

from bert_jax.tools.sweep.experiment import Claim, Column, Table

# Percentages of [MASK], the same token and a random token.
MIXES = ("80/10/10", "100/0/0", "80/0/20", "80/20/0", "0/20/80", "0/0/100")
USUAL = MIXES[0]
# On short rows of sentence pairs, at the small scale's rate of 2e-3, or with 15% masked (one token in
# rows of T=8), models whose targets are never kept stay at the unigram loss.
SMALL = {"model.next_sentence": "false", "masking.rate": 0.2, "optim.learning_rate": 1e-3}
SENTENCES = {"small": "SST-2", "paper": "MNLI"}
# The small models' features find no entities.
BY_FEATURES = {"small": "SST-2", "paper": "NER"}
NUMBERS = (
    (84.2, 95.4, 94.9),
    (84.3, 94.9, 94.0),
    (84.1, 95.2, 94.6),
    (84.4, 95.2, 94.7),
    (83.7, 94.8, 94.6),
    (83.6, 94.9, 94.6),
)
COLUMNS = ("MNLI", "NER, fine-tuned", "NER, features")
PAPER = recipes.numbers(MIXES, COLUMNS, NUMBERS)


def pretrained(args, mix, seed):
    """Return the pretraining of a mix, shared with other experiments for the paper's base."""
    if args.scale == "paper" and mix == USUAL:
        return recipes.base(args, mix)
    names = ("mask_fraction", "same_fraction", "random_fraction")
    shares = (int(percent) / 100 for percent in mix.split("/"))
    changes = {f"masking.{name}": share for name, share in zip(names, shares, strict=True)}
    if args.scale == "paper":
        return recipes.pretrained(args, mix, changes=changes)
    return recipes.pretrained(
        args, mix, changes=SMALL | changes, on=recipes.single_rows(args), seed=seed
    )


def get_points(args):
    """Return the fine-tuning of each mix, and training on the last four layers as features."""
    lstm = recipes.LSTM | {"model.head.features": "last4"}
    for seed in recipes.pretraining_seeds(args):
        for mix in MIXES:
            start = ["--init", pretrained(args, mix, seed)]
            for task, changes, by in (
                (SENTENCES[args.scale], {}, "fine-tuned"),
                ("NER", {}, "fine-tuned"),
                (BY_FEATURES[args.scale], lstm, "features"),
            ):
                yield recipes.finetuned(args, mix, start, task, changes, by, seed, by=by)


def get_blocks(results):
    """Return the table, and claims that the default mix is better than the others."""

    def table_and_claims(scale):
        sentences, features = SENTENCES[scale], f"{BY_FEATURES[scale]}, features"
        columns = {
            sentences: Column("dev.accuracy", {"task": sentences, "by": "fine-tuned"}),
            "NER, fine-tuned": Column("dev.f1", {"task": "NER", "by": "fine-tuned"}),
            features: Column(
                recipes.TASKS[scale][BY_FEATURES[scale]].metric,
                {"task": BY_FEATURES[scale], "by": "features"},
            ),
        }
        if scale == "small":
            columns["held-out loss"] = Column("masked_lm_loss", factor=1.0, digits=2)
        rows = {mix: {"model": mix} for mix in MIXES}
        claims = [Claim(features, USUAL, mix) for mix in MIXES[1:]]
        # Only [MASK] should hurt features most, which never contain it; no [MASK] should hurt all.
        claims += [Claim("NER, fine-tuned", USUAL, "100/0/0"), Claim(sentences, USUAL, "0/0/100")]
        return Table(rows, columns, PAPER, "MASK/SAME/RANDOM"), claims

    return recipes.page(table_and_claims)
