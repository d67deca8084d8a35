"""Registers, spills and shared memory of our kernels in the training step of base, compiled for an H100.

    python experiments/speed/registers.py && bert-jax report experiments/speed

It needs the extra gpu-compile and NVIDIA's ptxas (package nvidia-cuda-nvcc, or CUDA), no GPU, and writes
registers.jsonl, a line a kernel.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

OUT = pathlib.Path(__file__).parent / "registers.jsonl"
SETTINGS = ("dtype=bfloat16", "kernels=pallas", "layers=2", "vocab_multiple=128")


def compile_step(tokens: int, rows: int, folder: str) -> None:
    """Compile the step, and have XLA write each kernel's PTX and the launches to a folder."""
    os.environ["XLA_FLAGS"] = (
        f"--xla_dump_to={folder} --xla_gpu_dump_llvmir --xla_dump_emitter_re=.*"
    )
    from bert_jax.config.flags import load
    from bert_jax.runtime import device
    from bert_jax.runtime.topology import parse_topology
    from bert_jax.tools.preflight import estimate

    device.start("cpu", cache=False)
    model = (f"--config.model.{setting}" for setting in SETTINGS)
    config = load([f"--config=base,{tokens}", f"--config.batch_size={rows}", *model])
    estimate.preflight(config, parse_topology("h100:1"))


def registers(ptx: pathlib.Path) -> tuple[str, ...]:
    """Return a kernel's registers a thread, and the bytes that it stores because they do not suffice."""
    command = ["ptxas", "-v", "-arch=sm_90a", "-o", os.devnull, ptx]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    patterns = r"Used (\d+) registers", r"(\d+) bytes spill stores"
    return tuple(re.findall(pattern, text)[0] for pattern in patterns)


def main() -> None:
    """Compile steps of two lengths, and write the results."""
    keys, lines = ("tokens", "kernel", "threads", "registers", "spilled", "shared"), set()
    for tokens, rows in ((128, 256), (512, 64)):
        with tempfile.TemporaryDirectory() as folder:
            program = f"import registers; registers.compile_step({tokens}, {rows}, {folder!r})"
            subprocess.run([sys.executable, "-c", program], check=True, cwd=OUT.parent)
            codes = {}
            for ptx in pathlib.Path(folder).glob("*jit_step*.ptx"):
                for name in re.findall(r"\.entry (\w+)", ptx.read_text()):
                    codes[name] = ptx
            (launches,) = pathlib.Path(folder).glob("*jit_step.thunk_sequence.txt")
            launch = r" ((\w+?)(?:__\d+)?) grid: .* threads: \[(\d+), .* shared_memory: (\d+)"
            text = launches.read_text()
            for name, kernel, threads, shared in re.findall(launch, text):
                if kernel.startswith(("norm_", "packed_", "cross_")):
                    numbers = map(int, (threads, *registers(codes[name]), shared))
                    lines.add((tokens, kernel, *numbers))
    OUT.write_text(
        "".join(json.dumps(dict(zip(keys, x, strict=True))) + "\n" for x in sorted(lines))
    )


if __name__ == "__main__":
    main()
