"""One HTML page that needs no server and no network: escaped text, tables, figures with Plotly's script inside.

A content security policy refuses every request, whatever a figure would ask for. The page follows the reader's theme:
figures are made once in light colours, and those of `calib.figures.THEMES` are replaced one by one for dark.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from calib.figures import THEMES

__all__ = [
    "Html",
    "badge",
    "bullets",
    "command",
    "escaped",
    "figure",
    "joined",
    "page",
    "paragraph",
    "section",
    "table",
]


class Html(str):
    """Text that is HTML already; every other text is escaped."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """The value as HTML."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Parts one after the other, each escaped unless it is HTML."""
    return Html(between.join(escaped(part) for part in parts))


def badge(text: str, kind: str = "mark") -> Html:
    """A small label: what must not be overlooked (``mark``), ``good``, ``bad`` or ``plain``."""
    return Html(f'<span class="badge {kind}">{escaped(text)}</span>')


def bullets(items: Sequence[object]) -> Html:
    """A list; nothing without items."""
    return Html(f"<ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>") if items else Html("")


def command(*lines: str) -> Html:
    """What to type."""
    return Html(f"<pre><code>{escaped(chr(10).join(lines))}</code></pre>")


def paragraph(text: object, *, muted: bool = False) -> Html:
    """A paragraph; ``muted`` for what explains and is not a finding."""
    return Html(f"<p{' class=muted' if muted else ''}>{escaped(text)}</p>")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> Html:
    """A table that scrolls on narrow pages; the first ``left`` columns are text, the others align right."""

    def cells(values: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if i < left else ' class=number'}>{escaped(value)}</{tag}>" for i, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return Html(
        f'<div class="scroll"><table><thead><tr>{cells(columns, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def section(title: str, *parts: object, name: str) -> Html:
    """A section with an anchor."""
    return Html(f'<section id="{escaped(name)}"><h2>{escaped(title)}</h2>{joined(parts)}</section>')


def figure(drawn: go.Figure, *, wide: bool = False) -> Html:
    """A figure, drawn when the page is open; ``wide`` takes the whole width of the page."""
    text = drawn.to_json().replace("<", "\\u003c")  # in a script element only "</script" and "<!--" could do harm
    height = int(drawn.layout.height or 400)
    return Html(
        f'<div class="figure{" wide" if wide else ""}" style="min-height:{height}px">'
        f'<script type="application/json">{text}</script></div>'
    )


def page(title: str, *parts: object) -> str:
    """The whole document.

    Parameters
    ----------
    title : str
    *parts : object
        Content in order, each escaped unless it is `Html`.
    """
    library = get_plotlyjs().replace("</script", "<\\/script")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{_style()}</style></head><body><main>{joined(parts)}</main>"
        "<noscript>The figures need JavaScript; everything else is here without it.</noscript>"
        f"<script>{library}</script><script>{_script()}</script></body></html>\n"
    )


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def _style() -> str:
    light, dark = THEMES["light"], THEMES["dark"]

    def variables(colours: object, panel: str) -> str:
        assert isinstance(colours, dict)
        return "".join(f"--{role}:{colour};" for role, colour in colours.items()) + f"--panel:{panel};"

    return (
        f":root{{{variables(dict(light), '#f6f8fa')}}}"
        f"@media (prefers-color-scheme: dark){{:root{{{variables(dict(dark), '#1b2027')}}}}}" + _RULES
    )


_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1360px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:44px 0 10px}
h3{font-size:15px;margin:20px 0 6px}
p{margin:6px 0 10px;max-width:84ch}
.muted,small{color:var(--muted)}
a{color:inherit}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:14px 0 0;font-size:14px}
.badge{display:inline-block;padding:1px 9px;margin:0 4px 0 0;border-radius:10px;font-size:13px;border:1px solid}
.badge.mark{color:var(--mark);border-color:var(--mark)}
.badge.good{color:#0a7d5a;border-color:currentColor}
.badge.bad{color:#c2410c;border-color:currentColor}
.badge.plain{color:var(--muted);border-color:var(--grid)}
@media (prefers-color-scheme: dark){.badge.good{color:#4fc79b}.badge.bad{color:#f59569}}
.banner{border:1px solid var(--mark);border-radius:8px;padding:10px 14px;margin:16px 0 0;color:var(--mark)}
.answers{display:grid;grid-template-columns:repeat(3,1fr);gap:16px;margin:22px 0 0}
.answer{background:var(--panel);border:1px solid var(--grid);border-radius:10px;padding:16px 18px}
.answer h2{margin:0;font-size:14px;font-weight:600;color:var(--muted)}
.answer .short{font-size:20px;line-height:1.3;font-weight:600;margin:6px 0 8px}
.answer p{font-size:14px}
.answer ul,.answer dl{font-size:14px}
ul{margin:6px 0;padding-left:20px}
dl{display:grid;grid-template-columns:auto 1fr;gap:2px 14px;margin:8px 0 0}
dt{color:var(--muted)}
dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px 22px}
.figure{min-width:0}
.figure.wide{grid-column:1/-1}
.scroll{overflow-x:auto;margin:8px 0 14px}
table{border-collapse:collapse;font-size:14px;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--muted);vertical-align:bottom!important}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--grid);vertical-align:top}
.scroll td:first-child{min-width:17ch}
.number{text-align:right}
td.number,.whole{white-space:nowrap}
.reason{display:inline-block;min-width:30ch;color:var(--muted)}
pre{background:var(--panel);border:1px solid var(--grid);border-radius:8px;padding:10px 14px;overflow-x:auto}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
details{border-bottom:1px solid var(--grid);padding:7px 0}
summary{cursor:pointer;overflow-wrap:anywhere}
.text{white-space:pre-wrap;overflow-wrap:anywhere;max-width:100ch;margin:8px 0}
.option{overflow-wrap:anywhere}
.bar{display:inline-block;height:9px;border-radius:2px;margin-right:6px;vertical-align:middle;min-width:1px}
footer{margin-top:52px;padding-top:12px;border-top:1px solid var(--grid);font-size:13px;color:var(--muted)}
@media (max-width:1000px){.answers,.figures{grid-template-columns:minmax(0,1fr)}}
@media print{.figure,.answer,details{break-inside:avoid}}
"""


def _script() -> str:
    swaps = [[light, THEMES["dark"][role]] for role, light in THEMES["light"].items()]
    return (
        f"const swaps={json.dumps(swaps)};"
        """
const dark=matchMedia('(prefers-color-scheme: dark)');
const sources=new Map([...document.querySelectorAll('.figure')].map(
  box=>[box,box.querySelector('script').textContent]));
const shown=new Set();
function draw(box){
  let text=sources.get(box);
  if(dark.matches)for(const [light,other] of swaps)text=text.replaceAll(light,other);
  const figure=JSON.parse(text);
  shown.add(box);
  Plotly.react(box,figure.data,figure.layout,
    {responsive:true,displaylogo:false,modeBarButtonsToRemove:['select2d','lasso2d','autoScale2d']});
}
dark.addEventListener('change',()=>shown.forEach(draw));
const watch=new IntersectionObserver(seen=>{
  for(const one of seen)if(one.isIntersecting&&!shown.has(one.target))draw(one.target);
},{rootMargin:'600px'});
sources.forEach((_,box)=>watch.observe(box));
addEventListener('beforeprint',()=>sources.forEach((_,box)=>{if(!shown.has(box))draw(box)}));
"""
    )
