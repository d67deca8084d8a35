"""Write README.md from results.jsonl, extrapolating programs that were not compiled."""

import functools
import math
import pathlib
import statistics

import jax
import run as runs

from bert_jax.objectives import pretraining
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.tools import preflight
from bert_jax.training import state as state_lib

GIB, MIB = 2**30, 2**20


def known_fits(results, run, size, tokens):
    """Return the compiled programs that fit, by topology."""
    return {
        r["topology"]: r
        for r in results
        if (r["run"], r.get("size"), r.get("tokens")) == (run, size, tokens)
        and "report" in r
        and r["report"]["fits"]
    }


@functools.cache
def state_shapes(size, optimizer):
    """Return the shapes of the state, which are independent of T and the mesh."""
    config = runs.recipe(size, 128, 1)
    config.optim.optimizer = optimizer
    config, (phase,) = pretraining.abstract_phases(config, 1)
    mesh = jax.sharding.AbstractMesh((1, 1, 1), sharding.AXES)
    return state_lib.initial_state(config, phase, mesh)[1]


@functools.cache
def state_bytes(size, optimizer, sizes):
    """Return the bytes per chip of the state and of its parameters."""
    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
    shapes = state_shapes(size, optimizer)
    state = checkpoint.abstract(shapes, sharding.shardings(mesh, shapes))
    return sharding.bytes_per_device(state), sharding.bytes_per_device(state.params)


def expected(size, config, topology):
    """Return state, temporaries, traffic and collectives of a one-phase config by formula."""
    config, (phase,) = pretraining.abstract_phases(config, 1)
    sizes = sharding.mesh_sizes(config.mesh, topology.chips)
    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
    sharding.check_batch(mesh, phase.batch_size, phase.accumulation)
    optimizer = config.optim.optimizer
    state, params = state_bytes(size, optimizer, sizes)
    where = preflight.locations(topology)
    collectives = preflight.expected_collectives(config, phase, sizes, params)
    return {
        "config": config,
        "phase": phase,
        "state_shapes": state_shapes(size, optimizer),
        "state": state,
        "temporaries": preflight.expected_temporaries(config, phase, sizes, params),
        "traffic": preflight.expected_traffic(config, phase, sizes, params),
        "flops": phase.objective.flops_per_row
        * phase.batch_size
        / topology.chips
        * (4 / 3 if config.model.remat == "full" else 1),
        "sent": sum(one.sent_bytes for one in collectives),
        "network": sum(preflight.network_seconds(topology, where, one) for one in collectives),
    }


def make(size, tokens, chips, run):
    """Return the config of a program."""
    return runs.lamb(tokens) if run == "lamb" else runs.recipe(size, tokens, chips)


def predict(results, run, size, tokens, name):
    """Return a table cell: compiled, or extrapolated from the nearest compiled program.

    Values of the formulas are scaled by their errors on that program.
    """
    known = known_fits(results, run, size, tokens)
    if name in known:
        record = known[name]
        (phase,) = record["report"]["phases"]
        return {
            "how": "c",
            "change": record["change"],
            "total": phase["memory"]["total"],
            "times": phase["roofline"],
        }
    topology = preflight.parse_topology(name)
    candidates = known or known_fits(results, "recipe", size, tokens)
    if not candidates:
        return None

    def distance(other):
        candidate = preflight.parse_topology(other)
        return (candidate.kind != topology.kind, abs(math.log(candidate.chips / topology.chips)))

    nearest = min(candidates, key=distance)
    origin = candidates[nearest]
    (phase,) = origin["report"]["phases"]
    base_topology = preflight.parse_topology(nearest)
    base_config = make(size, tokens, base_topology.chips, origin["run"])
    runs.apply(base_config, origin["change"])
    base = expected(size, base_config, base_topology)
    sent = sum(kind["bytes"] for kind in phase["collectives"].values())
    scales = {
        "temporaries": phase["memory"]["temporaries"] / base["temporaries"],
        "traffic": phase["traffic"] / base["traffic"],
        "network": sent / base["sent"] if base["sent"] else 1.0,
    }
    config, change = make(size, tokens, topology.chips, run), ""
    here = expected(size, config, topology)
    temporaries = here["temporaries"] * scales["temporaries"]
    total = here["state"] + temporaries
    if total > topology.chip.memory_bytes:
        suggestion = preflight.would_fit(
            here["config"], 0, here["phase"], topology, here["state_shapes"], temporaries
        )
        if suggestion is None:
            return {"how": f"e {nearest}", "change": None, "total": total, "times": None}
        change, total = suggestion["arguments"], suggestion["total"]
        runs.apply(config, change)
        here = expected(size, config, topology)
    times = preflight.roofline(
        topology.chip,
        float(here["flops"]),
        here["traffic"] * scales["traffic"],
        float(here["network"] * scales["network"]),
    )
    return {"how": f"e {nearest}", "change": change, "total": total, "times": times}


def short(change):
    """Return the settings without those common to all rows."""
    return (
        change.replace("--config.model.", "").replace("--config.mesh.", "").replace("--config.", "")
    )


def milliseconds(cell):
    """Format the time of a step, and what bounds it."""
    if cell["times"] is None:
        return "does not fit"
    return f"{cell['times']['step_seconds'] * 1e3:.3g} {cell['times']['bound']}"


def memory(cell):
    """Format the total bytes per chip, with the change that made the run fit."""
    changed = f" with {short(cell['change'])}" if cell["change"] else ""
    return f"{cell['total'] / GIB:.2f}{changed}"


def how(cells):
    """Format whether each program was compiled."""
    return ", ".join("compiled" if c["how"] == "c" else f"from {c['how'][2:]}" for c in cells)


def misses(results):
    """Return the error of the extrapolation: each compiled program predicted from the nearest other."""
    memories, steps = [], []
    for size, tokens in ((size, tokens) for size in ("base", "large") for tokens in (128, 512)):
        for name, record in known_fits(results, "recipe", size, tokens).items():
            others = [r for r in results if r is not record]
            cell = predict(others, "recipe", size, tokens, name)
            # A program compiled with another change is not comparable.
            if cell and cell["times"] and cell["change"] == record["change"] and cell["how"] != "c":
                (phase,) = record["report"]["phases"]
                memories.append(cell["total"] / phase["memory"]["total"])
                steps.append(cell["times"]["step_seconds"] / phase["roofline"]["step_seconds"])
    if not steps:
        return []
    memory_ratios, step_ratios = (
        f"{min(x):.2f} to {max(x):.2f} (median {statistics.median(x):.2f})"
        for x in (memories, steps)
    )
    return [
        f"Error of the extrapolation: {len(steps)} compiled programs, each predicted from the nearest other",
        "one of its model and T. The ratio of prediction to compiled program is",
        f"{memory_ratios} for memory and {step_ratios} for the time of a step.",
        "",
    ]


def recipe_table(results, size):
    """Return the table of the paper's recipe for a size on all slices."""
    lines = [
        f"### {size}",
        "",
        "| slice | chips | GiB T=128 | GiB T=512 | ms a step T=128 | ms a step T=512 | hours | chip-hours | program T=128, T=512 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dominated = []
    for kind, shapes in runs.SLICES.items():
        first = dict.fromkeys(runs.RECIPE_STEPS)
        for shape in shapes:
            name = f"{kind}:{shape}"
            topology = preflight.parse_topology(name)
            cells = {
                tokens: predict(results, "recipe", size, tokens, name)
                for tokens in runs.RECIPE_STEPS
            }
            if None in cells.values():
                return [*lines, "", "nothing compiled yet"]
            hours = "-"
            spent = "-"
            if all(cell["times"] for cell in cells.values()):
                seconds = sum(
                    runs.RECIPE_STEPS[tokens] * cell["times"]["step_seconds"]
                    for tokens, cell in cells.items()
                )
                hours = f"{seconds / 3600:.3g}"
                spent = f"{seconds / 3600 * topology.chips:.4g}"
            for tokens, cell in cells.items():
                if cell["times"] and cell["times"]["bound"] == "network" and not first[tokens]:
                    first[tokens] = topology.chips
            both = list(cells.values())
            lines.append(
                f"| {name} | {topology.chips:,} | {memory(both[0])} | {memory(both[1])} | "
                f"{milliseconds(both[0])} | {milliseconds(both[1])} | {hours} | {spent} | {how(both)} |"
            )
        crossovers = ", ".join(
            f"T={tokens} from {chips:,} chips" if chips else f"T={tokens} never"
            for tokens, chips in first.items()
        )
        dominated.append(f"- {kind}: {crossovers}")
    return [*lines, "", "Where the network bounds a step:", "", *dominated]


def write(results, path: pathlib.Path):
    """Write the page."""
    programs = [x for x in results if "topology" in x and "report" in x]
    program = ("run", "size", "tokens", "topology", "change")  # may be compiled more than once
    compiled = [*{tuple(x[k] for k in program): x for x in programs}.values()]
    lines = [
        "# Scale: BERT-base and BERT-large on TPU slices, without the hardware",
        "",
        "Written by `report.py` from results.jsonl; the docstring of run.py describes what is compiled and",
        "how to continue. The program is the training step in bfloat16 with scanned layers, S=1, batch size 256 and",
        "data parallelism (above 256 chips, chips/256 of them share a row by tensor parallelism). Memory is per",
        "chip. Times are rooflines, the maximum of compute, memory and network time at data-sheet rates: lower bounds",
        "of the time of a step, not estimates. Hours are those of the paper's million steps, 900,000 at T=128 and",
        "100,000 at T=512.",
        "",
        f"{len(compiled)} programs compiled so far"
        + (f" (JAX {compiled[-1]['jax']}, libtpu {compiled[-1]['libtpu']})" if compiled else "")
        + ". The last column shows which numbers come from a program compiled for that slice. `from X` is",
        "extrapolated from the program compiled for X by formulas, scaled by their errors on that program.",
        "",
        *misses(results),
    ]
    for size in ("base", "large"):
        lines += [*recipe_table(results, size), ""]
    lines += [
        f"Not compiled: {x['run']} {x['size']} T={x['tokens']} {x['topology']} {short(x['change'])}: "
        f"{x['refused']}.\n"
        for x in results
        if "refused" in x
    ]
    lines += lamb_table(results)
    lines += refused(compiled)
    lines += loops_table(results)
    lines += step_table(results)
    lines += memory_table(results)
    path.write_text("\n".join(lines).rstrip() + "\n")
    print(path)


def lamb_table(results):
    """Return the table of the 76-minute run."""
    flops = 0.0
    lines = [
        "## LAMB: 76 minutes",
        "",
        "BERT-large, 7,038 steps of 65,536 rows of T=128 and 1,561 of 32,768 of T=512 (You et al.,",
        "arXiv 1904.00962) on 1,024 chips.",
        "",
        "| slice | GiB T=128 | GiB T=512 | ms a step T=128 | ms a step T=512 | minutes | program T=128, T=512 |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, shapes in runs.SLICES.items():
        name = f"{kind}:{shapes[4]}"
        cells = [predict(results, "lamb", "large", tokens, name) for tokens, _, _ in runs.LAMB]
        if None in cells:
            continue
        minutes = "-"
        if all(cell["times"] for cell in cells):
            seconds = sum(
                steps * cell["times"]["step_seconds"]
                for (_, _, steps), cell in zip(runs.LAMB, cells, strict=True)
            )
            minutes = f"{seconds / 60:.1f}"
        lines.append(
            f"| {name} | {memory(cells[0])} | {memory(cells[1])} | {milliseconds(cells[0])} | "
            f"{milliseconds(cells[1])} | {minutes} | {how(cells)} |"
        )
    for tokens, batch_size, steps in runs.LAMB:
        _, (phase,) = pretraining.abstract_phases(runs.lamb(tokens), 1)
        flops += phase.objective.flops_per_row * batch_size * steps
    least = flops / (runs.LAMB_CHIPS * runs.V3_FLOPS) / 60
    lines += [
        "",
        f"The published run took {runs.LAMB_MINUTES} minutes on 1,024 TPU v3 chips. Its {flops:.3g} FLOPs by "
        f"bert_jax's formula take {least:.1f} minutes at the peak of 123 TFLOP/s of a v3 chip, so it reached "
        f"{least / runs.LAMB_MINUTES:.0%} of the peak: a real run may take several times its roofline.",
        "",
    ]
    return lines


def refused(compiled):
    """Return a table of programs that did not fit, and whether preflight's suggestion fits."""
    lines = []
    for r in compiled:
        if r["report"]["fits"]:
            continue
        (phase,) = r["report"]["phases"]
        same = [
            x for x in compiled
            if x["change"] and not r["change"]
            and all(x[k] == r[k] for k in ("run", "size", "tokens", "topology"))
        ]  # fmt: skip
        suggestion = phase["would_fit"]
        outcome = "-"
        if same:
            total = same[0]["report"]["phases"][0]["memory"]["total"] / GIB
            outcome = f"{'fits' if same[0]['report']['fits'] else 'does not fit'}, {total:.2f}"
        lines.append(
            f"| {r['run']} {r['size']} T={r['tokens']} {r['topology']} {short(r['change'])} | "
            f"{phase['memory']['total'] / GIB:.2f} | "
            f"{short(suggestion['arguments']) if suggestion else 'nothing'} | "
            f"{suggestion['total'] / GIB if suggestion else 0:.2f} | {outcome} |"
        )
    if not lines:
        return []
    return [
        "## Programs that did not fit, and the change that preflight suggested",
        "",
        "| run | GiB required by the compiler | change | GiB estimated | compiled |",
        "|---|---|---|---|---|",
        *lines,
        "",
    ]


def loops_table(results):
    """Return the comparison of scanned and unrolled layers."""
    records = [r for r in results if r["run"] == "loops"]
    if not records:
        return []
    lines = [
        "## Scanned and unrolled layers",
        "",
        "The effect of compiling the layers as a loop: `small` (4 layers), T=128, batch size 256 on v5e:2x2. FLOPs",
        "are those of matrix products, with the body of a loop counted once per iteration; XLA's cost analysis",
        "counts it once.",
        "",
        "| layers | remat | FLOPs formula | compiled | XLA's cost analysis | temporaries MiB | memory traffic GB | sent GB | compile s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        (phase,) = r["report"]["phases"]
        sent = sum(kind["bytes"] for kind in phase["collectives"].values())
        flops = phase["flops"]
        lines.append(
            f"| {r['layer_loop']} | {r['remat']} | {flops['formula']:.5g} | {flops['compiled']:.5g} | "
            f"{flops['cost_analysis']:.5g} | {phase['memory']['temporaries'] / MIB:,.0f} | "
            f"{phase['traffic'] / 1e9:.3g} | {sent / 1e9:.3g} | {phase['compile_seconds']:.0f} |"
        )
    return [*lines, ""]


def step_table(results):
    """Return the comparison of the compiled training step between commits."""
    steps = [r for r in results if r["run"] == "step"]
    if not steps:
        return []
    one = steps[0]
    rows = [
        f"| {r['commit']} | {', '.join(r['scatters']) or 'none'} | {r['bytes_accessed'] / 1e9:.2f} | "
        f"{r['temporaries'] / 2**20:.1f} | {r['flops'] / 1e9:,.1f} | {r['compile_seconds']:.0f} |"
        for r in steps
    ]
    return [
        "## The compiled step, by commit",
        "",
        f"The training step of {one['size']} in bfloat16, compiled for {one['target']}: "
        f"{one['batch_size']} rows of T={one['tokens']}, S={one['sequences']}, layers unrolled, XLA's "
        "attention without attention dropout. Bytes and FLOPs are XLA's cost analysis for one device. "
        f"JAX {one['jax']}, libtpu {one['libtpu']}.",
        "",
        "| commit | scatters | GB accessed | MiB of temporaries | GFLOP | compiled in s |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def memory_table(results):
    """Return predictions and measurements on a CPU."""
    records = [r for r in results if r["run"] == "memory"]
    if not records:
        return []
    lines = [
        "## Memory, predicted and measured",
        "",
        "On a CPU: the memory of a step according to the compiler (arguments and temporaries), and the peak growth",
        "of the process during three steps (float32, scanned, T=128). A process that needs a small share of the",
        "machine's memory retains what a step frees for the next one, up to three times the temporaries (device.py), so",
        "small programs can use more than predicted.",
        "",
        "| model | settings | arguments MiB | temporaries MiB | predicted MiB | measured MiB | measured / predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in records:
        lines.append(
            f"| {r['size']} | {short(r['changes']) or 'batch_size=' + str(r['batch_size'])} | "
            f"{r['state'] / MIB:,.0f} | {r['temporaries'] / MIB:,.0f} | {r['predicted'] / MIB:,.0f} | "
            f"{r['measured'] / MIB:,.0f} | {r['measured'] / r['predicted']:.2f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    write(runs.results(), runs.HERE / "README.md")
