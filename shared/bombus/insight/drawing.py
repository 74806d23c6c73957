"""Draws charts without a browser, as SVG, PNG or PDF, with the package `vl-convert-python`."""

from typing import Any, Literal

import vl_convert

from bombus.insight.charts import Spec

Format = Literal["svg", "png", "pdf"]
# Texts and lines take the colour of the page around an SVG, light or dark. These hues are told apart on both.
COLOURS = ["#2f7ed8", "#e07b00", "#2a9d5c", "#c94f6d", "#8a63d2", "#7d8590", "#b8860b", "#17a2b8"]
_QUIET = {"gridColor": "#8884", "domainColor": "#888", "tickColor": "#888"}


def theme(ink: str) -> dict[str, Any]:
    """Return Vega's configuration with this colour for texts."""
    texts: dict[str, Any] = {
        "labelColor": ink,
        "titleColor": ink,
        "labelFontSize": 10,
        "titleFontSize": 10,
        "titleFontWeight": "normal",
    }
    return {
        "background": None,
        "title": {"color": ink, "fontSize": 13, "fontWeight": "normal"},
        "view": {"stroke": None},
        "axis": {**texts, **_QUIET},
        "legend": {**texts, "orient": "bottom", "columns": 2, "labelLimit": 220, "symbolOpacity": 1},
        "range": {"category": COLOURS},
        "font": "system-ui, sans-serif",
    }


def svg(spec: Spec) -> str:
    """Return a chart as SVG for a page, whose text colour its texts take."""
    return vl_convert.vegalite_to_svg({**spec, "config": theme("currentColor")})


def drawn(spec: Spec, kind: Format) -> bytes:
    """Return a chart as a file, dark on white. A PNG has two pixels per point."""
    white = {**spec, "config": {**theme("#1d1c19"), "background": "white"}}
    if kind == "png":
        return vl_convert.vegalite_to_png(white, scale=2.0)
    return vl_convert.vegalite_to_pdf(white) if kind == "pdf" else vl_convert.vegalite_to_svg(white).encode()
