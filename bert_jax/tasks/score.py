"""`bert-jax score`: score prediction files with the official metrics of their benchmarks."""

from bert_jax import storage
from bert_jax.errors import UserError
from bert_jax.tasks import conll_score, glue, squad_score


@storage.with_local_inputs("data", "predictions", "null_odds")
def score(
    benchmark: str, data: str, predictions: str, null_odds: str | None = None
) -> dict[str, float]:
    """Compute the official metrics of a prediction file.

    Args:
        benchmark: "squad1", "squad2", "glue:TASK" or "conll".
        data: path of the file with the answers.
        predictions: path of the predictions, in the benchmark's submission format.
        null_odds: for SQuAD 2.0, path of the odds that each question has no answer.
    """
    kind, _, name = benchmark.partition(":")
    if null_odds and kind != "squad2":
        raise UserError("--null-odds is for squad2 only: remove it")
    if kind in ("squad1", "squad2"):
        return squad_score.score_file(data, predictions, int(kind[-1]), null_odds)
    if kind == "glue" and name in glue.TASKS:
        return glue.score(name, data, predictions)
    if kind == "conll":
        return conll_score.score_file(data, predictions)
    raise UserError(
        f"no benchmark {benchmark!r}: choose squad1, squad2, conll or glue:TASK, where TASK is one of "
        f"{', '.join(glue.TASKS)}"
    )
