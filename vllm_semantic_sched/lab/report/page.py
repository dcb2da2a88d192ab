"""Writes a page as one HTML file that loads nothing: scripts, styles and data are inside.

Bokeh draws the charts. It comes with the extra `lab`, and is imported when used.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import yaml

from vllm_semantic_sched.lab.report.content import Chart, Page, is_word, number_text

FILE_NAME = "report.html"


def write_page(page: Page, folder: Path) -> Path:
    """Write report.html to a folder; returns its path. ModuleNotFoundError without Bokeh, or Jinja,
    which comes with it; OSError if the file cannot be written."""
    from jinja2 import Environment

    from vllm_semantic_sched.lab.report.charts import chart_json, script

    # Texts of requests are shown: whatever they contain, it must not become markup.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Bokeh's objects refer to earlier ones: their order must stay.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters["cell"] = lambda cell: cell if isinstance(cell, str) else number_text(cell)
    environment.tests["word"] = is_word
    environment.tests["chart"] = lambda part: isinstance(part, Chart)
    template = resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    charts = {f"part-{n}": part for n, part in enumerate(page.parts) if isinstance(part, Chart)}
    text = environment.from_string(template).render(
        page=page,
        script=script() if charts else "",
        charts=[chart_json(chart, element) for element, chart in charts.items()],
        configuration=_yaml(page.configuration),
        versions=_yaml(page.versions),
    )
    path = folder / FILE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _yaml(values: object) -> str:
    """Values as YAML; what YAML has no form for, such as a path, as text."""
    return yaml.safe_dump(json.loads(json.dumps(values, default=str)), sort_keys=False)
