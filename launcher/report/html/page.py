"""The shell of every HTML page: one file in light and dark that loads nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.html.blocks import drawn
from launcher.report.html.elements import Markup, joined, tag
from launcher.report.sections import Section

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_LIGHT = """--paper:#ffffff;--card:#f6f7f9;--ink:#16191d;--soft:#565d66;--line:#d9dde3;--grid:#e6e9ee;
--accent:#1f5fae;--target:#d7eede;--target-line:#157347;--bad:#a8201a;--bad-card:#fdf0ef;--good:#14663a;
--warn:#7a4a00;--hover:#1f5fae18;
--c0:#2467b8;--c1:#c2570c;--c2:#0f7b5f;--c3:#6a4bb5;--c4:#b0276a;--c5:#5c6570;
--m0:#2a78d6;--m1:#eda100;--m2:#12936a;--m3:#7a5cc7;--m4:#d9488b;--m5:#8a6d4f;--m6:#eb6834;--m7:#8b939d;
--m8:#2f8f9d;--m9:#b9a9e3;--m10:#6f8fae;"""
_DARK = """--paper:#14171b;--card:#1c2026;--ink:#eceff3;--soft:#a9b1bb;--line:#363c45;--grid:#292e36;
--accent:#7fb4f5;--target:#173a29;--target-line:#57c48d;--bad:#ff9a92;--bad-card:#2c1b1b;--good:#62c78f;
--warn:#e6b35a;--hover:#7fb4f51f;
--c0:#6aa9f4;--c1:#f0883e;--c2:#45c39b;--c3:#ab93f0;--c4:#ee7bb0;--c5:#a9b1bb;
--m0:#3987e5;--m1:#c98500;--m2:#199e70;--m3:#9085e9;--m4:#d55181;--m5:#a58968;--m6:#d95926;--m7:#7d8590;
--m8:#3a97a5;--m9:#5b5296;--m10:#5d7f9f;"""

_TEXT = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink);
background:var(--paper)}
.page{max-width:78rem;margin:0 auto;padding:2.2rem 1.25rem 4rem}
h1,h2,h3{line-height:1.25;margin:0;text-wrap:balance;overflow-wrap:anywhere}
h1{font-size:1.9rem;font-weight:680;letter-spacing:-.015em}
h2{font-size:1.25rem;font-weight:650;margin:0 0 .9rem;padding-top:1.4rem;border-top:1px solid var(--line)}
h3{font-size:1rem;font-weight:650;margin:1.6rem 0 .5rem}
p{margin:.4rem 0;max-width:70ch;overflow-wrap:anywhere}
a{color:var(--accent);text-underline-offset:.15em}
.soft{color:var(--soft)}.small{font-size:.875rem}
.over{font-size:.8rem;letter-spacing:.06em;text-transform:uppercase;color:var(--soft);margin:0 0 .35rem}
.lead{font-size:1.05rem;max-width:none}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.85em}
code{overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem;margin:.6rem 0;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:34rem;overflow-y:auto;line-height:1.5}
pre code{font-size:.94em}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
header{margin-bottom:1.4rem}
.title{display:flex;flex-wrap:wrap;gap:.6rem 1rem;align-items:center}
.state{font-size:.9rem;font-weight:600;padding:.12rem .7rem;border:1.5px solid;border-radius:99px;
color:var(--soft);white-space:nowrap}
.state.finished{color:var(--good)}.state.failed{color:var(--bad)}.state.stopped{color:var(--warn)}
.state.running,.state.planned{color:var(--accent)}
nav ul{list-style:none;margin:0;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
nav a{color:var(--soft);text-decoration:none;font-size:.92rem}
nav a:hover{color:var(--accent);text-decoration:underline}
section{margin-bottom:2.2rem;scroll-margin-top:.5rem}
"""

_PARTS = """
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.75rem;margin:1.2rem 0}
.tiles>div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.75rem .95rem}
.tiles dt{font-size:.82rem;color:var(--soft)}
.tiles dd{margin:0;font-size:1.45rem;font-weight:640;letter-spacing:-.01em;font-variant-numeric:tabular-nums;
line-height:1.3;overflow-wrap:anywhere}
.tiles dd.note{font-size:.82rem;font-weight:400;color:var(--soft);letter-spacing:0}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left}
th,td{text-align:left;vertical-align:top;padding:.42rem 1.1rem .42rem 0;border-bottom:1px solid var(--line);
overflow-wrap:break-word}
tbody tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:500;font-size:.84rem;white-space:nowrap}
tbody th{font-weight:500}th code,.settings td:nth-child(2) code{overflow-wrap:normal}
.numbers td,.numbers thead th:not(:first-child){text-align:right;white-space:nowrap}
.numbers{width:auto;min-width:min(100%,20rem)}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));column-gap:2.5rem}
.beside .numbers{width:100%}
.wide table:not(.numbers) :is(th,td){min-width:5.5rem}.numbers th{overflow-wrap:normal}
.settings tbody th{white-space:nowrap}.settings td:nth-child(2){min-width:7rem}
.settings td:last-child{min-width:14rem}
.from{white-space:nowrap;font-size:.82rem;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.9rem 1.1rem;
margin:.8rem 0}
.card>:first-child{margin-top:0}.card>:last-child{margin-bottom:0}
.card pre{background:var(--paper)}
.bad{background:var(--bad-card);border-color:var(--bad)}.bad h3{color:var(--bad)}
dl.pairs{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.3rem 1.2rem;margin:.6rem 0;
font-size:.94rem}
dl.pairs dt{color:var(--soft)}dl.pairs dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
details{margin:.8rem 0}
summary{cursor:pointer;color:var(--accent);font-size:.94rem;padding:.2rem 0}
summary .soft{margin-left:.6rem}
ul.plain{margin:.4rem 0;padding-left:1.2rem;max-width:75ch}ul.plain li{margin:.25rem 0;overflow-wrap:anywhere}
.sample{unicode-bidi:isolate}
ul.thumbs{display:flex;flex-wrap:wrap;gap:.8rem;margin:.6rem 0;padding:0;list-style:none;font-size:.875rem}
ul.thumbs li{max-width:11rem;overflow-wrap:anywhere}ul.thumbs img{display:block;max-width:100%}
mark{background:var(--target);color:inherit;border-bottom:2px solid var(--target-line)}
mark::before,mark::after{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
mark::before{content:" [target: "}mark::after{content:" end of target] "}
footer{border-top:1px solid var(--line);padding-top:1rem;color:var(--soft);font-size:.85rem}
"""

_CHARTS = """
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,16.5rem),1fr));gap:1.2rem 1.6rem}
.charts>.first{grid-column:1/-1}
figure{margin:.8rem 0;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;justify-content:space-between;margin-bottom:.7rem}
.head{font-weight:600}figcaption *{min-width:0;overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;font-size:.88rem;color:var(--soft);
font-variant-numeric:tabular-nums}
.legend b{color:var(--ink);font-weight:600}
.entry{display:inline-flex;align-items:center;gap:.4em}
.frame{padding:2px 10px 40px 58px}.frame.bars{padding:2px 10px 38px 0;overflow-x:clip}
svg.plot{display:block;overflow:visible}
.plot text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.plot text.ink,.plot .name{fill:var(--ink)}.plot .name{font-weight:600}
.plot .ink{font-size:13.5px;paint-order:stroke;stroke:var(--paper);stroke-width:5px;stroke-linejoin:round}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft)}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.d1{stroke-dasharray:7 5}.d2{stroke-dasharray:2 5}.d3{stroke-dasharray:9 4 2 4}.d4{stroke-dasharray:4 3}
.d5{stroke-dasharray:12 4}
.dot{stroke:var(--paper);stroke-width:1.5}
.event{stroke:var(--warn);stroke-dasharray:3 3}
.event+text{paint-order:stroke;stroke:var(--paper);stroke-width:5px;stroke-linejoin:round}
.hit{fill:transparent}.hit:hover{fill:var(--hover)}
.part{stroke:var(--paper);stroke-width:1.5}
.limit,.span,.mark{stroke:var(--ink);fill:none;stroke-width:1.5}
.limit{stroke-dasharray:5 4}.mark{stroke-width:2}
.halo{stroke:var(--paper);stroke-width:4.5;fill:none}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.55em}
"""
_CHARTS += "".join(f".line.c{n}{{stroke:var(--c{n})}}.dot.c{n}{{fill:var(--c{n})}}" for n in range(6))
_CHARTS += "".join(f".m{n}{{fill:var(--m{n});background:var(--m{n})}}" for n in range(11))

_MEDIA = """
@media (min-width:68rem){.page{display:grid;grid-template-columns:11.5rem minmax(0,1fr);column-gap:3rem}
header,footer{grid-column:1/-1}
nav{position:sticky;top:1.5rem;align-self:start;padding-top:1.4rem}
nav ul{display:block}nav li{margin:.35rem 0}}
@media (max-width:67.99rem){nav{border-top:1px solid var(--line);padding:.7rem 0;margin-bottom:.6rem}}
@media (max-width:30rem){body{font-size:15px}.page{padding:1.3rem 1rem 3rem}h1{font-size:1.5rem}
dl.pairs{grid-template-columns:1fr;gap:.05rem}dl.pairs dd{margin-bottom:.5rem}
.tiles{grid-template-columns:1fr 1fr;gap:.5rem}.tiles dd{font-size:1.2rem}.frame{padding-left:50px}
th,td{padding-right:.8rem}
.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.stack,.stack tbody,.stack tr,.stack th,.stack td{display:block;min-width:0!important;border:0}
.stack tr{padding:.55rem 0;border-bottom:1px solid var(--line)}
.stack tbody th,.stack td{padding:.1rem 0;white-space:normal}.stack th code{font-weight:650}}
@media print{nav{display:none}.page{display:block;max-width:none;padding:0}body{font-size:11pt}
section{break-inside:auto}figure,.card,.tiles>div,tr{break-inside:avoid}h2,h3{break-after:avoid}
pre{max-height:none;overflow:visible}.wide{overflow:visible}
details::details-content{content-visibility:visible;display:block}summary{color:var(--ink);list-style:none}
.hit{display:none}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""

_SCHEMES = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
)
_STYLE = Markup(_SCHEMES + _TEXT + _PARTS + _CHARTS + _MEDIA)


def page_head(title: str, policy: str, *more: Markup) -> Markup:
    """What every page begins with. policy: what it may load."""
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", _STYLE),
        *more,
    )


def page(
    title: str,
    top: Sequence[Markup],
    sections: Sequence[Section | None],
    footer: str,
    script: tuple[str, Markup] | None = None,
) -> str:
    """The file: header, navigation, sections, and a line at the end.

    script: its nonce and its text, of a page that is served; it asks its own server only.
    """
    policy = POLICY
    if script is not None:
        policy += f"; script-src 'nonce-{script[0]}'; connect-src 'self'"
    shown = [section for section in sections if section is not None]
    links = (tag("li", tag("a", section.title, href=f"#{section.id}")) for section in shown)
    parts = [drawn(section) for section in shown]
    body = tag(
        "div",
        tag("header", *top),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *parts),
        tag("footer", tag("p", footer)),
        class_="page",
    )
    head = page_head(title, policy)
    own = [] if script is None else [tag("script", script[1], nonce=script[0])]
    return f"<!DOCTYPE html>\n{tag('html', joined([head, tag('body', body, *own)]), lang='en')}\n"
