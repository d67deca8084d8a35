"""`bert-jax score`: anyone's prediction files, scored as the benchmarks' own programs do."""

from bert_jax.errors import UserError


def score(
    benchmark: str, data: str, predictions: str, null_odds: str | None = None
) -> dict[str, float]:
    """The official metrics of a prediction file.

    Args:
        benchmark: "squad1", "squad2", "glue:TASK" or "conll".
        data: the file with the answers.
        predictions: in the benchmark's submission format.
        null_odds: SQuAD 2.0's file of how likely each question has no answer.

    Raises:
        UserError: an unknown benchmark, a file that is not what it should be.
    """
    kind, _, name = benchmark.partition(":")
    if null_odds and kind != "squad2":
        raise UserError("--null-odds is for squad2")
    if kind in ("squad1", "squad2"):
        from bert_jax.tasks import squad_score

        return squad_score.score_file(data, predictions, int(kind[-1]), null_odds)
    if kind == "glue":
        from bert_jax.tasks import glue

        if name not in glue.TASKS:
            raise UserError(
                f"no benchmark {benchmark!r}: glue:TASK is one of {', '.join(glue.TASKS)}"
            )
        return glue.score(name, data, predictions)
    if kind == "conll":
        from bert_jax.tasks import conll_score

        return conll_score.score_file(data, predictions)
    raise UserError(f"no benchmark {benchmark!r}: squad1, squad2, glue:TASK or conll")
