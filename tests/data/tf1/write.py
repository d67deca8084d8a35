"""Writes this folder's checkpoints with TensorFlow, and compares our reader with TensorFlow's.

Needs an environment with tensorflow-cpu and google-crc32c beside this project's source:

    PYTHONPATH=. python tests/data/tf1/write.py           # write, then check
    PYTHONPATH=. python tests/data/tf1/write.py --check   # check what is here

`bert_model.ckpt` is shaped as a release of Google's pretraining code, with Adam's slots as its own
checkpoints of a running training have them. `other.ckpt` has two data files and every other type.
"""

import argparse
import json
import pathlib
import zlib

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).parent
CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 40,
}
VOCAB = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] . , the a king river mountain book child sees follows finds "
    "in near after morning bridge old new ##s ##ed ##ing b c d e o r ##a ##b ##e ##n ##o ##r ##t"
).split()


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers within 0.1 of 0 (of 1 for gamma) that follow from the name and place alone."""
    place = np.arange(np.prod(shape, dtype=int), dtype=np.uint64)
    mixed = (place * 2654435761 + zlib.crc32(name.encode())) % 2**32
    numbers = ((mixed >> np.uint64(12)).astype(np.float32) / 2**20 - 0.5) / 5
    return (numbers + name.endswith("gamma")).astype(np.float32).reshape(shape)


def bert() -> dict[str, np.ndarray]:
    """Every tensor of `bert_model.ckpt`."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}

    def dense(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}/kernel"], shapes[f"{name}/bias"] = (inputs, outputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}/LayerNorm/gamma"] = shapes[f"{name}/LayerNorm/beta"] = (hidden,)

    shapes["bert/embeddings/word_embeddings"] = (CONFIG["vocab_size"], hidden)
    shapes["bert/embeddings/position_embeddings"] = (CONFIG["max_position_embeddings"], hidden)
    shapes["bert/embeddings/token_type_embeddings"] = (CONFIG["type_vocab_size"], hidden)
    norm("bert/embeddings")
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"bert/encoder/layer_{i}"
        for part in ("self/query", "self/key", "self/value", "output/dense"):
            dense(f"{layer}/attention/{part}", hidden, hidden)
        norm(f"{layer}/attention/output")
        dense(f"{layer}/intermediate/dense", hidden, inner)
        dense(f"{layer}/output/dense", inner, hidden)
        norm(f"{layer}/output")
    dense("bert/pooler/dense", hidden, hidden)
    dense("cls/predictions/transform/dense", hidden, hidden)
    norm("cls/predictions/transform")
    shapes["cls/predictions/output_bias"] = (CONFIG["vocab_size"],)
    shapes["cls/seq_relationship/output_weights"] = (2, hidden)
    shapes["cls/seq_relationship/output_bias"] = (2,)
    names = [f"{name}{slot}" for name in shapes for slot in ("", "/adam_m", "/adam_v")]
    tensors = {name: value(name, shapes[name.split("/adam_")[0]]) for name in names}
    return {**tensors, "global_step": np.int64(1234567890123)}


def other() -> dict[str, np.ndarray]:
    """Every tensor of `other.ckpt` but the string, which our reader does not read."""
    return {
        "bfloat16": value("bfloat16", (3, 5)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "float16": value("float16", (7,)).astype(np.float16),
        "float64": value("float64", (2, 3, 4)).astype(np.float64) / 3,
        "int32": np.array([-1, 2**31 - 1], np.int32),
        "scalar": np.float32(-0.0),
    }


def write(tensors: dict[str, np.ndarray | str], prefix: str, shards: int) -> None:
    import tensorflow as tf

    tf1 = tf.compat.v1
    with tf.Graph().as_default():
        for i, (name, tensor) in enumerate(tensors.items()):
            with tf.device(f"/cpu:{i % shards}"):
                tf1.get_variable(name, initializer=tf.constant(tensor), use_resource=False)
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": shards})) as session:
            session.run(tf1.global_variables_initializer())
            saver = tf1.train.Saver(sharded=shards > 1)
            path = str(FOLDER / prefix)
            saver.save(session, path, write_meta_graph=False, write_state=False)


def check(tensors: dict[str, np.ndarray], prefix: str) -> None:
    """Fails unless our reader and TensorFlow's give the same bytes for every tensor."""
    import tensorflow as tf

    from bert_jax.convert import tensorflow1

    theirs = tf.train.load_checkpoint(str(FOLDER / prefix))
    names = set(theirs.get_variable_to_shape_map()) - {"string"}
    ours = tensorflow1.read(FOLDER, prefix, lambda name: name != "string")
    assert set(ours) == names == set(tensors)
    for name, tensor in ours.items():
        expected = np.asarray(theirs.get_tensor(name))
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert tensor.tobytes() == expected.tobytes() == np.asarray(tensors[name]).tobytes(), name
    print(f"{prefix}: {len(ours)} tensors are TensorFlow {tf.__version__}'s, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        (FOLDER / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        (FOLDER / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
        write(bert(), "bert_model.ckpt", shards=1)
        write({**other(), "string": "text"}, "other.ckpt", shards=2)
    check(bert(), "bert_model.ckpt")
    check(other(), "other.ckpt")
