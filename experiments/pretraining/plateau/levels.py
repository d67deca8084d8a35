"""Measure the held-out losses of count models on the rows of the experiments, into levels.json.

    python experiments/pretraining/plateau/levels.py plateau=ROWS small=ROWS single=ROWS

`plateau` are the rows of T=128 of this experiment (the point "featured128"), `small` those of the small
scale of the other experiments ("rows128"), and `single` those with single sequences ("rows128-single").
Names that are not given are kept. The bigram model knows the left neighbor only.
"""

import argparse
import json
import pathlib

from bert_jax.data.rows import read_manifest
from bert_jax.tools.report import levels

PATH = pathlib.Path(__file__).with_name("levels.json")


def main() -> None:
    """Write the losses of each folder of rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="+", help="NAME=FOLDER")
    results = json.loads(PATH.read_text())
    for argument in parser.parse_args().rows:
        name, _, folder = argument.partition("=")
        results[name] = levels.read(folder, read_manifest(folder).digest)._asdict()
    PATH.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
