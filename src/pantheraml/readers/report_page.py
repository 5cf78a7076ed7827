"""HTML of the report: style, script and building blocks. Every text passes through `escape`."""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Sequence
from typing import Any

from pantheraml.base.text import printable

# No external resources: the file must work offline and must not reveal that it was opened.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

OPENING = b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
"""Head of every page."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1c2330; --soft: #5c6675; --line: #e2e6ec; --grid: #edf0f4;
  --train: #2f6db5; --faint: #a9c5e6; --eval: #cf5b2e; --other: #2a8a78;
  --run0: #2f6db5; --run1: #cf5b2e; --run2: #2a8a78;
  --run3: #8a4fb0; --run4: #b07b00; --run5: #c0397a; --run6: #5c7a29; --run7: #5c6675;
  --good: #1f7a4d; --good-bg: #e3f4ea; --bad: #b3261e; --bad-bg: #fce8e6; --warn: #8a5a00; --warn-bg: #fdf1d8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #99a4b3; --line: #2b333f; --grid: #252c37;
    --train: #6ea8e8; --faint: #3f618a; --eval: #f0905f; --other: #5cc2ac;
    --run0: #6ea8e8; --run1: #f0905f; --run2: #5cc2ac;
    --run3: #c39be6; --run4: #e0b44c; --run5: #f08ab8; --run6: #a6c66a; --run7: #99a4b3;
    --good: #7ed3a2; --good-bg: #17352a; --bad: #ff9d94; --bad-bg: #43201e; --warn: #eec26b; --warn-bg: #3a2f17;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
header { margin-bottom: 24px; }
h1 { font-size: 26px; font-weight: 650; letter-spacing: -0.01em; margin: 0 12px 0 0; display: inline-block;
  overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 650; margin: 36px 0 12px; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 4px; }
p { margin: 4px 0; max-width: 75ch; }
.soft, footer { color: var(--soft); }
header p, footer p { max-width: none; }
.pill { display: inline-block; padding: 2px 12px; border-radius: 999px; font-size: 13px; font-weight: 600;
  vertical-align: 5px; background: var(--grid); color: var(--soft); }
.pill.good { background: var(--good-bg); color: var(--good); }
.pill.bad { background: var(--bad-bg); color: var(--bad); }
.pill.warn { background: var(--warn-bg); color: var(--warn); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.figure { padding: 12px 16px; }
.figure b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 13px; }
.card { padding: 16px; }
.alert { border-radius: 10px; padding: 14px 18px; margin: 0 0 20px; background: var(--bad-bg); color: var(--bad);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.alert.warn { background: var(--warn-bg); color: var(--warn); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 16px; }
.charts .wide, .charts .card:last-child:nth-child(even) { grid-column: 1 / -1; }
.plot { height: 250px; } .wide .plot { height: 340px; }
.note { color: var(--soft); font-size: 12.5px; min-height: 0; }
.scroll { overflow-x: auto; padding: 4px 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 8px 16px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.pre { white-space: pre-wrap; min-width: 9ch; }
td:first-child { overflow-wrap: break-word; }
.controls { display: flex; flex-wrap: wrap; gap: 8px 20px; margin: -4px 0 12px; font-size: 13px; color: var(--soft);
  align-items: center; }
select { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 4px 8px; }
input[type=checkbox] { vertical-align: -2px; width: 16px; height: 16px; }
:focus-visible { outline: 2px solid var(--train); outline-offset: 2px; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 12px 0 0; }
td.best { color: var(--good); font-weight: 600; }
@media (max-width: 600px) { main { padding: 20px 14px 48px; } .plot, .wide .plot { height: 240px; }
  .figures { grid-template-columns: repeat(2, 1fr); } .card { padding: 12px; } .scroll { padding: 4px 12px; }
  td.pre { min-width: 12ch; } }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 40px; font-size: 13px; }
@media print { body { background: #fff; } .card, .figure { break-inside: avoid; } }
"""

# Colors come from the style sheet, so that light, dark and a change of theme share one set of names.
SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const chosen = name => document.getElementById("choose-" + name);
const xNames = { step: "step", epoch: "epoch", tokens: "tokens", minutes: "minutes of training" };
function draw() {
  const x = chosen("x")?.value ?? "step", smoothness = chosen("smoothing")?.value ?? "none";
  const log = chosen("log")?.checked;
  charts.forEach((chart, index) => {
    const axis = { gridcolor: color("grid"), linecolor: color("line"), zeroline: false, automargin: true };
    const own = chart.series.some(series => series.axes[x]);
    const shown = chart.series.filter(series => !series.smoothness || series.smoothness === smoothness);
    const xName = own ? xNames[x] : chart.x;
    const alone = smoothness === "none" && chart.series.some(series => series.smoothness);
    const role = series => alone && series.role === "faint" ? "train" : series.role;
    const traces = shown.map(series => ({
      x: series.axes[x] ?? series.x, y: series.y, name: series.name, type: "scatter",
      showlegend: series.legend, connectgaps: false, text: series.labels ?? undefined,
      mode: series.labels ? "markers" : series.markers ? "lines+markers" : "lines",
      line: { color: color(role(series)), width: series.role === "faint" ? 1 : 2,
        dash: series.name === "predicted" ? "dash" : "solid" },
      marker: { size: series.labels ? 10 : 6, color: color(role(series)), symbol: series.labels ? "x-thin" : "circle",
        line: { width: series.labels ? 2.5 : 0, color: color(series.role) } },
      hovertemplate: xName + " %{x:,}<br>" + (series.labels ? "%{text}" : "%{y:.5g}") +
        "<extra>" + (shown.length > 1 ? series.name : "") + "</extra>",
    }));
    const layout = {
      margin: { l: 48, r: 12, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
      showlegend: shown.filter(series => series.legend).length > 1,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1.0, yanchor: "bottom" },
      xaxis: { ...axis, title: { text: xName, standoff: 6 } },
      yaxis: { ...axis, ...(chart.top ? { range: [0, chart.top] } : {}), type: log && chart.log ? "log" : "linear",
        rangemode: chart.from_zero ? "tozero" : "normal", tickformat: chart.ticks },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink") } },
    };
    Plotly.react("chart-" + index, traces, layout, { responsive: true, displayModeBar: false });
  });
}
draw();
document.querySelectorAll(".controls select, .controls input").forEach(each => each.addEventListener("change", draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""


def escape(text: Any) -> str:
    return html.escape(printable(text))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: frozenset[int] = frozenset(),
    best: Container[tuple[int, int]] = (),
) -> str:
    """Table of plain text; `numbers` are the right-aligned columns, `best` the cells (row, column) to point out."""
    kinds = ["number" if index in numbers else "pre" for index in range(len(columns))]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, columns, strict=True))
    lines = []
    for line, row in enumerate(rows):
        cells = zip(range(len(columns)), kinds, row, strict=True)
        marked = ((f"{kind} best" if (line, column) in best else kind, cell) for column, kind, cell in cells)
        lines.append("<tr>" + "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in marked) + "</tr>")
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def figure_cards(figures: Iterable[tuple[str, str]]) -> str:
    cards = "".join(f'<div class="figure"><b>{escape(v)}</b><span>{escape(name)}</span></div>' for name, v in figures)
    return f'<div class="figures">{cards}</div>'


def chart_cards(titles_and_notes: Sequence[tuple[str, str]], *, first: int = 0) -> str:
    """Placeholders for the charts from number `first` on; number 0, the loss, takes the full width."""
    cards = []
    for index, (title, note) in enumerate(titles_and_notes, first):
        wide = " wide" if index == 0 else ""
        text = f'<div class="note">{escape(note)}</div>' if note else ""
        cards.append(
            f'<div class="card{wide}"><h3>{escape(title)}</h3><div class="plot" id="chart-{index}"></div>{text}</div>'
        )
    return f'<div class="charts">{"".join(cards)}</div>'


def chart_controls(*, smoothing: Sequence[str] = (), chosen: str = "") -> str:
    """Choices for all charts over steps; `smoothing` are the names of what the loss may be smoothed by."""
    axes = (("step", "steps"), ("epoch", "epochs"), ("tokens", "tokens"), ("minutes", "time"))
    options = "".join(f'<option value="{value}">{name}</option>' for value, name in axes)
    parts = [f'<label>over <select id="choose-x">{options}</select></label>']
    if smoothing:
        levels = "".join(
            f'<option value="{name}"{" selected" if name == chosen else ""}>{name}</option>'
            for name in ("none", *smoothing)
        )
        parts.append(f'<label>smoothing <select id="choose-smoothing">{levels}</select></label>')
    parts.append('<label><input type="checkbox" id="choose-log"> log scale of loss and norm</label>')
    return f'<div class="controls">{"".join(parts)}</div>'


def folded(title: str, text: str) -> str:
    """Return long text that the reader can unfold."""
    return f'<details class="card"><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>'


def page(title: str, body: str, chart_data: str, plotly: str) -> str:
    """Assemble the file. In the JSON `chart_data`, '<' is escaped, so that no text can end the script."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>{body}</main>\n"
        f'<script type="application/json" id="charts">{chart_data}</script>\n'
        f"<script>{plotly}</script>\n<script>{SCRIPT}</script></body></html>\n"
    )
