"""A model as MTEB (Muennighoff et al., arXiv 2210.07316) evaluates it: mteb's `EncoderProtocol`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from bert_jax.errors import missing

try:
    from mteb.models import ModelMeta  # pyright: ignore[reportMissingImports]
    from mteb.models.model_meta import (  # pyright: ignore[reportMissingImports]
        ScoringFunction,
    )
    from mteb.similarity_functions import (  # pyright: ignore[reportMissingImports]
        cos_sim,
        pairwise_cos_sim,
    )
except ImportError as error:
    raise missing("MTEB is not installed", "mteb") from error


class MtebEncoder:
    """Vectors of texts for `mteb.evaluate`, compared by cosine.

    Args:
        embed: function of texts that returns [N, D]; takes `prompt` if there are prompts.
        name: name of the model in results, "organization/model" or a path, of which the end is taken.
        prompts: what is put before texts, by mteb's type of prompt: "query" or "document".
    """

    def __init__(self, embed: Callable[..., Any], name: str, prompts: Mapping[str, str]):
        self._embed, self._prompts = embed, prompts
        name = "/".join(["bert_jax", *name.strip("/").split("/")][-2:])
        changes = {"name": name, "revision": "local", "similarity_fn_name": ScoringFunction.COSINE}
        self.mteb_model_meta = ModelMeta.create_empty(changes)

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **_: Any
    ) -> Float[np.ndarray, "N D"]:
        """Return the vectors of the texts of all batches."""
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = self._prompts.get(getattr(prompt_type, "value", ""))
        return self._embed(texts, **({} if prompt is None else {"prompt": prompt}))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the cosine of each vector of the first array with each of the second."""
        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the cosines of vectors at the same place."""
        return pairwise_cos_sim(embeddings1, embeddings2)
