"""A ladder's results in `runs/.ladders/NAME`: findings as JSON, a verbal table, and two figures."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

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
from lapcli.runtime.files import write_bytes, write_json, write_text
from lapcli.runtime.tables import fitted, to_csv

LADDERS = ".ladders"
#: What the baseline shows on a rung, beside how much the arms differ from it: measurement, value, heading.
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
    diverged = [name for name, each in states.items() if each.diverged]
    at_edge = {
        arm
        for arm, keys in ladder.optima.items()
        if not all(list(optima.values())[-1].is_bracketed for optima in keys.values())
    }
    edges = [
        f"{arm}: its best {key} on {rung}, {optimum.value:g}, is at the edge of those tried; add values beyond it"
        for arm, keys in ladder.optima.items()
        for key, optima in keys.items()
        for rung, optimum in optima.items()
        if not optimum.is_bracketed
    ]
    notes = [
        f"p-values are adjusted by Holm for {len(findings)} comparisons with the baseline; intervals are not.",
        *(f"{name} diverged; its pair is left out" for name in diverged),
        *(f"{arm} is not judged: it has no pair" for arm in ladder.arms[1:] if arm not in findings),
        *edges,
    ]
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
        "verdicts": {
            arm: in_words(finding) + ("; its rate is at the edge of those tried" if arm in at_edge else "")
            for arm, finding in findings.items()
        },
        "findings": {arm: asdict(finding) for arm, finding in findings.items()},
        "at_the_shared_rate": {arm: asdict(finding) for arm, finding in at_shared.items()},
        "optima": {
            arm: {key: {rung: optimum._asdict() for rung, optimum in optima.items()} for key, optima in keys.items()}
            for arm, keys in ladder.optima.items()
        },
        "moves": moves,
        "pairs": {arm: [_numbers(rung) for rung in rungs] for arm, rungs in own.items()},
        "cells": [
            {"cell": e.cell.name, "phase": e.phase, "rung": e.rung, "arm": e.arm, "state": _state(states[e.cell.name])}
            for e in planned
        ],
        "notes": notes,
    }
    told["plain_models"] = plain_models(ladder)
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
        path = ladder.runs_dir / ladder.own(rung, ladder.baseline, 0).name
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


def _mechanism_rows(plain: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[Sequence[str]]:
    """Format the means over layers, and the similarity of tokens layer by layer."""
    *headings, by_layer = (heading for _, _, heading in MECHANISM)
    rows: list[Sequence[str]] = [("plain model", *headings, by_layer)]
    for rung, measured in plain.items():
        means = ["-" if None in measured[h] else f"{fmean(measured[h]):.3f}" for h in headings]  # type: ignore[arg-type]
        layers = " ".join("-" if value is None else f"{value:.2f}" for value in measured[by_layer])
        rows.append((rung, *means, layers))
    return rows


def _state(training: Any) -> str:
    return "diverged" if training.diverged else str(training.status)


def _numbers(rung: Rung) -> dict[str, Any]:
    return {key: value if isinstance(value, str | float | int) else list(value) for key, value in vars(rung).items()}


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
    title = f"{told['ladder']}: {told['outcome']} of each arm minus that of {told['baseline']}, with 95% intervals"
    tables = [fitted(rows), fitted(verdicts), fitted(_mechanism_rows(told["plain_models"]))]
    return "\n".join([title, *(line for each in tables for line in ("", *each)), "", *told["notes"]])


def draw(
    folder: Path,
    findings: Mapping[str, Finding],
    own: Mapping[str, Sequence[Rung]],
    unit: str,
    held_out: str | None,
    margin: float,
) -> None:
    """Draw the difference over compute, one panel an arm, and all arms' outcomes over compute; with their CSV."""
    import matplotlib as mpl

    label = unit.replace("validation_", "").replace("_", " ")
    with mpl.rc_context(STYLE):
        columns = min(3, len(findings)) or 1
        figure, axes = panels(columns, -(-len(findings) // columns) or 1, 3.2, 2.6)
        lowest = []
        for place, (panel, (arm, finding)) in enumerate(zip(axes.flat, findings.items(), strict=False)):
            panel.axhspan(-margin, margin, color="#eeeeee", zorder=0)
            panel.axhline(0, color="#888888", linewidth=0.8)
            for rung in finding.rungs:
                d, is_held = rung.difference, rung.name == held_out
                bars = [[max(0.0, d.value - d.low)], [max(0.0, d.high - d.value)]]
                face = "white" if is_held else COLOURS[place % len(COLOURS)]
                style = {"color": COLOURS[place % len(COLOURS)], "marker": "o", "capsize": 3, "mfc": face}
                panel.errorbar([rung.compute], [d.value], yerr=bars if math.isfinite(bars[0][0]) else None, **style)
                panel.annotate(rung.name, (rung.compute, d.value), xytext=(5, 4), textcoords="offset points")
                lowest += [x for x in (d.value, d.low, d.high) if math.isfinite(x)]
            _over_compute(panel, [rung.compute for rungs in own.values() for rung in rungs])
            panel.set_title(f"{arm}: {finding.verdict}")
        for panel in axes.flat[len(findings) :]:
            panel.remove()
        for panel in axes[:, 0]:
            panel.set_ylabel(f"difference in {label}\n(below 0: better)")
        _save(figure, folder / "differences")
        figure, ((panel,),) = panels(1, 1, 5.2, 3.4)
        lines = {"baseline": [(r.compute, r.baseline) for r in next(iter(own.values()), [])]}
        lines |= {arm: [(r.compute, r.arm) for r in rungs] for arm, rungs in own.items() if arm != AA}
        for place, (arm, points) in enumerate(lines.items()):
            style = {
                "color": COLOURS[(place - 1) % len(COLOURS)] if place else "#000000",
                "marker": MARKERS[place % 10],
            }
            panel.plot([c for c, _ in points], [sum(y) / len(y) for _, y in points], label=arm, **style)
        _over_compute(panel, [rung.compute for rungs in own.values() for rung in rungs])
        panel.set_ylabel(label)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        _save(figure, folder / "outcomes")
    rows: list[list[Any]] = []
    for arm, finding in findings.items():
        for r in finding.rungs:
            rows.append([arm, r.name, r.compute, r.pairs, r.difference.value, r.difference.low, r.difference.high])
    write_text(folder / "differences.csv", to_csv(["arm", "rung", "flops", "pairs", "difference", "low", "high"], rows))
    means = [[arm, compute, sum(y) / len(y), len(y)] for arm, points in lines.items() for compute, y in points]
    write_text(folder / "outcomes.csv", to_csv(["arm", "flops", unit, "runs"], means))


def _over_compute(panel: Any, computes: Sequence[float]) -> None:
    """Extend a panel to whole decades of FLOPs, so that minor tick labels are not needed."""
    logs = [math.log10(compute) for compute in computes]
    panel.set(xscale="log", xlabel="FLOPs of a run", xlim=(10 ** math.floor(min(logs)), 10 ** math.ceil(max(logs))))
    panel.xaxis.set_minor_formatter("")


def _save(figure: Any, path: Path) -> None:
    for form in ("png", "svg"):
        content = io.BytesIO()
        figure.savefig(content, format=form, dpi=160, bbox_inches="tight", metadata=UNDATED.get(form))
        write_bytes(path.with_suffix(f".{form}"), content.getvalue())
