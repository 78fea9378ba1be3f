"""Parts of a page that follows a run: its ranks, its logs, and the script that draws it again. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from launcher.files.rank_status import RankStatus
from launcher.report.html.elements import Markup, joined, tag
from launcher.report.sections import Controls, Section, table_of

SCRIPT = Markup("""
const token = new URLSearchParams(location.search).get('token');
const ask = (path, more = {}) => fetch(path + '?' + new URLSearchParams({token, ...more}));
async function log() {
  const name = document.querySelector('#log-name'), shown = document.querySelector('#log-text');
  if (!name || !name.value) return;
  const search = document.querySelector('#log-search').value;
  const answer = await ask('/log', {name: name.value, search});
  const below = shown.scrollTop + shown.clientHeight >= shown.scrollHeight - 4;
  shown.firstChild.textContent = await answer.text();
  if (below) shown.scrollTop = shown.scrollHeight;
}
async function renew() {
  const answer = await ask('/');
  if (!answer.ok) return;
  const next = new DOMParser().parseFromString(await answer.text(), 'text/html');
  const kept = document.querySelector('#logs'), place = next.querySelector('#logs');
  const names = place && place.querySelector('#log-name').innerHTML;
  if (kept && place) {
    const select = kept.querySelector('#log-name'), chosen = select.value;
    if (select.innerHTML !== names) { select.innerHTML = names; select.value = chosen || select.value; }
  }
  for (const part of ['header', 'nav']) document.querySelector(part).replaceWith(next.querySelector(part));
  for (const section of next.querySelectorAll('main > section')) {
    const old = document.getElementById(section.id);
    if (section.id === 'logs' && old) continue;
    if (old) {
      const open = [...old.querySelectorAll('details')].map(part => part.open);
      [...section.querySelectorAll('details')].forEach((part, i) => { part.open = Boolean(open[i]); });
      old.replaceWith(section);
    } else document.querySelector('main').append(section);
  }
  document.title = next.title;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  await log();
}
document.addEventListener('input', event => { if (event.target.closest('#logs')) log(); });
new EventSource('/events?' + new URLSearchParams({token})).onmessage = renew;
log();
""")
"""Sections are replaced by their ids; opened details, the chosen log and what is searched for stay."""


_COLUMNS = {
    "rank": "{rank}", "node": "{host}", "phase": "{doing}", "step": "{step:count}", "for": "{for_s:seconds}",
    "median step": "{median:seconds}", "peak memory": "{memory:bytes}", "exit status": "{code:count}",
}  # fmt: skip


def ranks_section(statuses: Mapping[int, RankStatus]) -> Section | None:
    """The last status of every rank; None before the first has one."""
    now, scopes = time.time(), []
    for rank, status in sorted(statuses.items()):
        for_s = max(0.0, now - status.since) if status.code is None else None
        doing = status.title or status.phase
        scopes.append({**asdict(status), "rank": str(rank), "doing": doing, "for_s": for_s})
    table = table_of("Ranks", _COLUMNS, scopes, "stack")
    return Section("ranks", "Ranks", table) if table else None


def logs_section(names: Sequence[str]) -> Section:
    """A log that is chosen, and a word that is searched for in it; the script fills it."""
    options = joined(tag("option", name) for name in names)
    chosen = tag("label", "log ", tag("select", options, id="log-name"))
    search = tag("label", "search ", tag("input", id="log-search", type="search"))
    seen = {"role": "region", "aria_label": "The last lines of the log"}
    text = tag("pre", tag("code", ""), id="log-text", tabindex="0", **seen)
    return Section("logs", "Logs", [Controls(joined([tag("p", chosen, " ", search), text]))])
