"""A ladder's results in `runs/.ladders/NAME`: findings as JSON, a verbal table, and two figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil, floor
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lapcli.analysis.analyze import analyze, write_analysis
from lapcli.analysis.analyzed_models import find_models, results_folder
from lapcli.analysis.drawing import COLOURS, MARKERS, STYLE, UNDATED, panels
from lapcli.analysis.measurement import Settings
from lapcli.experiments.cells import progress
from lapcli.experiments.ladder import AA, Ladder
from lapcli.experiments.referee import ALPHA, Estimate, Finding, Rung, judge
from lapcli.result_rows import results
from lapcli.runs import read_run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_json, write_text
from lapcli.runtime.tables import fitted, to_csv

LADDERS = ".ladders"
#: Measurements of the baseline on a rung, shown beside the differences: measurement, value, heading.
MECHANISM = (
    ("sinks", "to_first", "to the first token"),
    ("sinks", "to_self", "to itself"),
    ("sinks", "cosine_with_value", "cos(o, v)"),
    ("ov", "mean_eigenvalue", "eigenvalue of OV"),
    ("cossim", "cosine_similarity", "similarity by layer"),
)


def target_compute(ladder: Ladder, target: str | None) -> float | None:
    """Parse `--target`: the name of a rung or a number of FLOPs."""
    if target is None or target in ladder.file.rungs:
        return None if target is None else ladder.compute(target)
    try:
        compute = float(target)
    except ValueError:
        compute = 0.0
    if not 0 < compute < math.inf:
        rungs = ", ".join(ladder.file.rungs)
        raise UsageError(f"--target {target[:40]!r}: expected one of the rungs {rungs}, or FLOPs such as 1e19")
    return compute


def answer(ladder: Ladder, target: str | None = None) -> dict[str, Any]:
    """Judge a ladder whose cells have all been tried, write its files and return the contents of `ladder.json`."""
    file, place = ladder.file, target_compute(ladder, target)
    own, shared = ladder.judged_rungs()
    moves = ladder.moves()
    transfers = all(factor <= file.transfer_within for factor in moves.values())
    options: dict[str, Any] = {"margin": file.margin, "held_out": file.held_out}
    can_judge = {arm: rungs for arm, rungs in own.items() if any(rung.name != file.held_out for rung in rungs)}
    findings = judge(can_judge, target=place, rates_transfer=transfers, **options) if can_judge else {}
    at_shared = judge(shared, **options) if shared else {}
    planned = ladder.planned()
    states = {each.cell.name: progress(each.cell, ladder.runs_dir) for each in planned}
    unit = f"error of {file.outcome}" if planned[0].cell.loaded.metrics[file.outcome][1] == "higher" else file.outcome
    verdicts = {arm: in_words(finding) for arm, finding in findings.items()}
    notes = [
        f"p-values are adjusted by Holm for {len(findings)} comparisons with the baseline; intervals are not.",
        *(f"{name} diverged; its pair is left out" for name, each in states.items() if each.diverged),
        *(f"{arm} is not judged: it has no pair" for arm in ladder.arms[1:] if arm not in findings),
    ]
    for arm, key, optima in ladder.tuned():
        for rung, optimum in optima.items():
            if not optimum.is_bracketed:
                best = f"{optimum.value:g}, is at the edge of those tried"
                notes.append(f"{arm}: its best {key} on {rung}, {best}; add values beyond it")
        if arm in verdicts and not list(optima.values())[-1].is_bracketed:
            verdicts[arm] += f"; its {key} is at the edge of those tried"
    if not transfers:
        worst = max(moves, key=lambda name: moves[name])
        notes.append(
            f"rates do not transfer on this ladder: the optimum moves by a factor of {moves[worst]:.2g} ({worst}), "
            f"more than {file.transfer_within:g}; beyond the tuned rungs an arm is not at its optimum"
        )
    if AA in findings and findings[AA].adjusted_p <= ALPHA:  # also where the target is too far for a verdict
        notes.append("the baseline differs from itself (A/A): do not trust the other verdicts of this ladder")
    told: dict[str, Any] = {
        "ladder": ladder.name,
        "outcome": unit,
        "baseline": ladder.baseline,
        "target": place,
        "rates_transfer": transfers,
        "verdicts": verdicts,
        "findings": {arm: asdict(finding) for arm, finding in findings.items()},
        "at_the_shared_rate": {arm: asdict(finding) for arm, finding in at_shared.items()},
        "optima": [
            {"arm": arm, "key": key, "rung": rung, **optimum._asdict()}
            for arm, key, optima in ladder.tuned()
            for rung, optimum in optima.items()
        ],
        "moves": moves,
        "pairs": {arm: [asdict(rung) for rung in rungs] for arm, rungs in own.items()},
        "cells": [
            {
                "cell": each.cell.name,
                "phase": each.phase,
                "rung": each.rung,
                "arm": each.arm,
                "state": "diverged" if states[each.cell.name].diverged else states[each.cell.name].status,
            }
            for each in planned
        ],
        "notes": notes,
        "plain_models": plain_models(ladder),
    }
    told["text"] = text_of(told, findings, at_shared)
    folder = ladder.runs_dir / LADDERS / ladder.name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "ladder.json", told)
    write_text(folder / "ladder.txt", told["text"] + "\n")
    if findings:  # none if every run of all arms diverged
        draw(folder, findings, own, unit, file.held_out, file.margin)
    return told


def plain_models(ladder: Ladder) -> dict[str, dict[str, list[float | None]]]:
    """Return the measurements of the baseline's first run on each rung, by layer; each run is measured once."""
    found: dict[str, dict[str, list[float | None]]] = {}
    tasks = list(dict.fromkeys(task for task, _, _ in MECHANISM))
    for rung in ladder.rungs:
        path = ladder.runs_dir / ladder.tuned_cell(rung, ladder.baseline, 0).name
        run = read_run(path)
        if run.status != "finished":  # it diverged
            continue
        frame = results(path)
        if missing := [task for task in tasks if task not in set(frame.task)]:
            models = find_models(Settings(), [run])
            for analysis in analyze(missing, models, Settings()):
                write_analysis(analysis, results_folder(models, ladder.runs_dir))
            frame = results(path)
        of = {(task, name): frame[(frame.task == task) & (frame.metric == name)] for task, name, _ in MECHANISM}
        found[rung] = {heading: of[task, name].sort_values("layer").value.tolist() for task, name, heading in MECHANISM}
    return found


def in_words(finding: Finding) -> str:
    """Return the verdict with its supporting numbers."""
    numbers = f"{_interval(finding.difference)} at {finding.at}, p {finding.adjusted_p:.2g}"
    if finding.verdict == "no effect":
        return f"no effect within {finding.margin:g} ({numbers})"
    if finding.verdict == "not enough pairs":
        needed = finding.pairs_needed
        more = "at least two" if needed is None else f"about {needed:,}"
        return f"not enough pairs ({more} a rung are needed; {numbers})"
    return f"{finding.verdict} ({numbers})"


def _interval(estimate: Estimate, form: str = "+.4f") -> str:
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def text_of(told: Mapping[str, Any], findings: Mapping[str, Finding], shared: Mapping[str, Finding]) -> str:
    """Format the tables: pairs by arm and rung, then the verdicts."""
    header = ("arm", "rung", "FLOPs", "n", "difference", "at the shared rate", "compute multiplier", "at equal time")
    rows: list[Sequence[str]] = [header]
    for arm, finding in findings.items():
        at_shared = {rung.name: rung.difference for rung in shared[arm].rungs} if arm in shared else {}
        for rung in finding.rungs:
            multipliers = [_interval(m, ".2f") if m else "-" for m in (rung.multiplier, rung.time_multiplier)]
            same = _interval(at_shared[rung.name]) if rung.name in at_shared else "-"
            first = (arm, rung.name, f"{rung.compute:.2g}", str(rung.pairs), _interval(rung.difference))
            rows.append((*first, same, *multipliers))
    verdicts = [("arm", "verdict", "change for 10x the compute", "held-out rung")]
    for arm, finding in findings.items():
        trend = "-" if finding.trend is None else _interval(finding.trend)
        held = finding.held_out
        where = "-" if held is None else f"{held.measured:+.4f}, predicted {_interval(held.predicted)}"
        verdicts.append((arm, told["verdicts"][arm], trend, where))
    *headings, by_layer = (heading for _, _, heading in MECHANISM)
    plain: list[Sequence[str]] = [("plain model", *headings, by_layer)]
    for name, measured in told["plain_models"].items():  # means over layers, and the similarity of tokens by layer
        means = ["-" if None in measured[h] else f"{fmean(measured[h]):.3f}" for h in headings]
        layers = " ".join("-" if value is None else f"{value:.2f}" for value in measured[by_layer])
        plain.append((name, *means, layers))
    title = f"{told['ladder']}: {told['outcome']} of each arm minus that of {told['baseline']}, with 95% intervals"
    tables = [line for each in (rows, verdicts, plain) for line in ("", *fitted(each))]
    return "\n".join([title, *tables, "", *told["notes"]])


def draw(
    folder: Path,
    findings: Mapping[str, Finding],
    own: Mapping[str, Sequence[Rung]],
    unit: str,
    held_out: str | None,
    margin: float,
) -> None:
    """Draw the difference over compute, one panel per arm, with its CSV; and all arms' outcomes over compute."""
    import matplotlib as mpl

    label = unit.replace("validation_", "").replace("_", " ")
    logs = [math.log10(rung.compute) for rungs in own.values() for rung in rungs]
    # Complete decades, so that minor tick labels are not needed.
    scale = {"xscale": "log", "xlabel": "FLOPs of a run", "xlim": (10 ** floor(min(logs)), 10 ** ceil(max(logs)))}
    with mpl.rc_context(STYLE):
        columns = min(3, len(findings))
        differences, axes = panels(columns, -(-len(findings) // columns), 3.2, 2.6)
        for place, (panel, (arm, finding)) in enumerate(zip(axes.flat, findings.items(), strict=False)):
            panel.axhspan(-margin, margin, color="#eeeeee", zorder=0)
            panel.axhline(0, color="#888888", linewidth=0.8)
            colour = COLOURS[place % len(COLOURS)]
            for rung in finding.rungs:
                d = rung.difference
                bars = [[max(0.0, d.value - d.low)], [max(0.0, d.high - d.value)]]
                style = {"color": colour, "marker": "o", "mfc": "white" if rung.name == held_out else colour}
                yerr = bars if math.isfinite(d.low) else None
                panel.errorbar([rung.compute], [d.value], yerr=yerr, capsize=3, **style)
                panel.annotate(rung.name, (rung.compute, d.value), xytext=(5, 4), textcoords="offset points")
            panel.set(title=f"{arm}: {finding.verdict}", **scale)
            panel.xaxis.set_minor_formatter("")
        for panel in axes.flat[len(findings) :]:
            panel.remove()
        for panel in axes[:, 0]:
            panel.set_ylabel(f"difference in {label}\n(below 0: better)")
        outcomes, ((panel,),) = panels(1, 1, 5.2, 3.4)
        lines = {"baseline": [(r.compute, np.mean(r.baseline)) for r in next(iter(own.values()))]}
        lines |= {arm: [(r.compute, np.mean(r.arm)) for r in rungs] for arm, rungs in own.items() if arm != AA}
        for place, (arm, points) in enumerate(lines.items()):
            colour = COLOURS[(place - 1) % len(COLOURS)] if place else "#000000"
            panel.plot(*zip(*points, strict=True), label=arm, color=colour, marker=MARKERS[place % len(MARKERS)])
        panel.set(ylabel=label, **scale)
        panel.xaxis.set_minor_formatter("")
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        for name, figure in (("differences", differences), ("outcomes", outcomes)):
            for form in ("png", "svg"):
                figure.savefig(folder / f"{name}.{form}", dpi=160, bbox_inches="tight", metadata=UNDATED.get(form))
    rows = [
        [arm, r.name, r.compute, r.pairs, r.difference.value, r.difference.low, r.difference.high]
        for arm, finding in findings.items()
        for r in finding.rungs
    ]
    write_text(folder / "differences.csv", to_csv(["arm", "rung", "flops", "pairs", "difference", "low", "high"], rows))
