"""Writes the page, and its figures as files beside it."""

from pathlib import Path

from lapcli.report.assemble import Report
from lapcli.report.claims import judge_all
from lapcli.report.compare import TABLES, paper_tables
from lapcli.report.figures import draw_all, write_files
from lapcli.report.page import page
from lapcli.runtime.files import write_for_user


def write_page(report: Report, path: Path) -> list[Path]:
    """The page's path, then the folder of its figures if there are any."""
    runs = report.collection.runs
    drawings = draw_all(report.grids)
    papers = [table for which in TABLES for table in paper_tables(which, runs)]
    write_for_user(path, page(report, papers, judge_all(runs), drawings))
    if not drawings:
        return [path]
    folder = path.with_name(f"{path.stem}_figures")
    write_files(drawings, folder)
    return [path, folder]
