"""The page: its style, its parts in order, what was left out. It loads nothing from anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from monta_megatron.common.presets import versions
from monta_megatron.tools.report import markup

# The policy makes a browser refuse whatever is not part of the page itself.
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --quiet: #59636e; --back: #ffffff;
  --raised: #f6f8fa; --line: #d1d9e0; --mark: #fff1e5; --accent: #b35900; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --quiet: #9198a1; --back: #0d1117; --raised: #151b23;
    --line: #3d444d; --mark: #33210f; --accent: #f0a35e; } }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 60rem; color: var(--text);
  background: var(--back); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
.quiet, summary { color: var(--quiet); font-size: .9rem; }
.gain { font-size: 1.15rem; font-weight: 600; color: var(--accent); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: 0; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
.scrolls { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--raised); font-weight: 600; white-space: nowrap; }
td:last-child:not(.number) { min-width: 14rem; }
.number { text-align: right; white-space: nowrap; }
tr.marked td { background: var(--mark); font-weight: 600; }
img { display: block; max-width: 100%; box-sizing: border-box; margin: .75rem 0; padding: .5rem;
  background: #ffffff; border: 1px solid var(--line); border-radius: 6px; }
details { margin: .75rem 0; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>$title</h1>
$head
$sections
$foot
</body>
</html>
""")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        body: its HTML, from `markup`.
    """

    title: str
    body: str


def page(title: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """The HTML document.

    Args:
        title: of the page.
        sections: its parts, in order.
        left_out: which parts are not there, and what would give them.
    """
    of = versions()
    made = f"monta-megatron {of['monta-megatron'] or 'from a checkout'}, Python {of['python']}"
    foot = markup.heading("Left out") + markup.bullets(left_out) if left_out else ""
    return _PAGE.substitute(
        title=escape(title),
        head=markup.paragraph(f"made by monta report; {made}", "quiet"),
        sections="\n".join(
            f"<section><h2>{escape(section.title)}</h2>\n{section.body}\n</section>"
            for section in sections
        ),
        foot=foot,
    )
