// The planner's page. What is planned is one state (recipes, hardware, changes, configurations), which is
// also the fragment of the address; every change of it asks the planner again, the selected plan first.
//
// The planner answers questions as launcher/commands/plan_page.py documents them: in a thread of the browser
// (worker.js), or at the server that `plan --browser` started.

const start = JSON.parse(document.getElementById('start').textContent);
const SLIDERS = [
  {key: 'data.max_length', name: 'Length in tokens', values: [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]},
  {key: 'trainer.per_device_train_batch_size', name: 'Micro-batch', values: [1, 2, 4, 8, 16, 32, 64]},
  {key: 'adapter.r', name: 'Rank of the adapter', values: [4, 8, 16, 32, 64, 128, 256]},
  {key: 'sharding.zero_stage', name: 'ZeRO stage', values: [0, 1, 2, 3]},
  {key: 'model.quantization', name: 'Quantisation of the frozen weights', values: ['none', 'int8', 'nf4']},
];
const PAUSE_MS = 40; // after a keystroke, in which another one is waited for
const NAME_PAUSE_MS = 800; // the same in a model's name that the server would ask the hub for
const LARGEST_STATE = 4 << 20; // bytes of what a link holds, unpacked

const byId = id => document.getElementById(id);

/** An element: its attributes (`on…` are listeners, true and false are properties), then what it contains. */
function make(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else if (typeof value === 'boolean') made[key] = value;
    else if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...inside);
  return made;
}

const said = text => { byId('said').textContent = text; };

// --- the planner

/** Asks the planner; the answer as an object. A server's is no longer waited for when the signal aborts. */
let ask;

function serverPlanner() {
  ask = async (question, signal) => {
    const answer = await fetch(`ask${start.query}`, {method: 'POST', body: JSON.stringify(question), signal});
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };
  return Promise.resolve();
}

function workerPlanner() {
  const worker = new Worker('worker.js', {type: 'module'});
  const waiting = new Map();
  let last = 0;
  ask = question => new Promise((resolve, reject) => {
    waiting.set(++last, {resolve, reject});
    worker.postMessage({id: last, text: JSON.stringify(question)});
  });
  return new Promise((ready, failed) => {
    worker.onmessage = ({data}) => {
      if (data.loaded !== undefined) byId('loading').value = data.loaded;
      else if (data.ready) ready();
      else if (data.failed) failed(new Error(data.failed));
      else {
        const {resolve, reject} = waiting.get(data.id);
        waiting.delete(data.id);
        if (data.error === undefined) resolve(JSON.parse(data.text));
        else reject(new Error(data.error));
      }
    };
    worker.onerror = event => failed(new Error(event.message || 'worker.js cannot be loaded'));
    worker.postMessage({files: start.files});
  });
}

// --- the state, and the link to it

const state = {recipes: [], on: [], sets: {}, configs: {}};
let catalogue;
let selected = 0; // the column whose details are shown

async function pipe(bytes, stream, largest = Infinity) {
  let length = 0;
  const counting = new TransformStream({transform(part, out) {
    length += part.byteLength;
    if (length > largest) throw new Error('too large');
    out.enqueue(part);
  }});
  const out = new Blob([bytes]).stream().pipeThrough(stream).pipeThrough(counting);
  return new Uint8Array(await new Response(out).arrayBuffer());
}

async function packed(value) {
  const bytes = await pipe(new TextEncoder().encode(JSON.stringify(value)), new CompressionStream('deflate-raw'));
  const text = Array.from(bytes, byte => String.fromCharCode(byte)).join('');
  return btoa(text).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.replaceAll('-', '+').replaceAll('_', '/')), char => char.charCodeAt(0));
  return JSON.parse(new TextDecoder().decode(await pipe(bytes, new DecompressionStream('deflate-raw'), LARGEST_STATE)));
}

/** The state in the address; null without one, and for one that cannot be read, which is said. */
async function linked() {
  const found = /^#plan=(.*)$/.exec(location.hash);
  if (!found) return null;
  try {
    const {recipes, on, sets, configs = {}} = await unpacked(found[1]);
    const texts = recipes.every(one => typeof one.path === 'string' && typeof one.text === 'string');
    const strings = [...on, ...Object.values(sets)].every(one => typeof one === 'string');
    const objects = [sets, configs, ...Object.values(configs)].every(one => one.constructor === Object);
    if (Array.isArray(on) && on.length && recipes.length && texts && strings && objects) {
      said('');
      return {recipes: recipes.slice(0, 2), on, sets, configs};
    }
  } catch {
    // Not of this page, or cut off.
  }
  said('The link is damaged: it is shown without its state. Copy the whole link again.');
  return null;
}

let ownHash = '';

async function keepLink() {
  const mine = number, hash = `#plan=${await packed(state)}`;
  if (mine !== number) return; // a newer state is being packed
  ownHash = hash;
  history.replaceState(null, '', ownHash);
}

// --- completion of keys and values, by the JSON Schema of recipes

/** All schemas that a schema stands for. */
function alternatives(schema, depth = 0) {
  if (!schema || typeof schema !== 'object' || depth > 8) return [];
  if (schema.$ref) {
    const target = schema.$ref.split('/').slice(1).reduce((at, part) => at && at[part], catalogue.schema);
    return alternatives(target, depth + 1);
  }
  const several = [...(schema.anyOf || []), ...(schema.oneOf || []), ...(schema.allOf || [])];
  return [schema, ...several.flatMap(one => alternatives(one, depth + 1))];
}

/** The schemas of a value. path: keys, and null for an item of a list. */
function schemasAt(path) {
  let found = alternatives(catalogue.schema);
  for (const key of path) {
    found = found.flatMap(schema => {
      if (key === null) return alternatives(schema.items);
      if (schema.properties && Object.hasOwn(schema.properties, key)) return alternatives(schema.properties[key]);
      return typeof schema.additionalProperties === 'object' ? alternatives(schema.additionalProperties) : [];
    });
  }
  return found;
}

const KEY = /^(\s*)((?:- +)*)(?:(["']?)([\w.-]+)\3 *:(?: +(.*)|$))?/;

/** The path of the mapping or list that the last line of `text` is in, by its indentation. */
function enclosing(lines, column) {
  const path = [];
  let inside = column;
  for (let at = lines.length - 1; at >= 0 && inside > 0; at--) {
    const found = KEY.exec(lines[at]);
    if (!lines[at].trim() || /^\s*#/.test(lines[at]) || (!found[4] && !found[2])) continue;
    const dash = found[1].length, key = dash + found[2].length;
    if (found[4] && key < inside && !found[5]) { path.unshift(found[4]); inside = key; }
    if (found[2] && dash < inside) { path.unshift(null); inside = Math.min(inside, dash + 1); }
  }
  return path;
}

/** Path, what is begun, and whether it is a value, where the cursor is at the end of `text`. */
function place(text) {
  const lines = text.split('\n');
  const line = lines.pop();
  if (/^\s*#/.test(line) || / #/.test(line)) return null;
  const found = KEY.exec(line);
  let path = enclosing(lines, found[1].length + found[2].length);
  if (found[2]) path = [...enclosing(lines, found[1].length), null];
  let rest = found[4] ? found[5] : line.slice(found[0].length);
  if (found[4]) path = [...path, found[4]];
  if (rest === undefined) return null; // directly behind the colon
  let value = Boolean(found[4]);
  // Inside { } and [ ] of this line.
  const opened = /^[^{[]*([{[].*)$/.exec(rest);
  if (opened) {
    const stack = [];
    let begun = '', key = null;
    for (const char of opened[1]) {
      if (char === '{' || char === '[') {
        if (key !== null) stack.push({key});
        stack.push({open: char});
        key = null; begun = '';
      } else if (char === '}' || char === ']') {
        while (stack.length && !stack.pop().open);
        if (stack.length && stack[stack.length - 1].key !== undefined) stack.pop();
        begun = '';
      } else if (char === ',') { key = null; begun = ''; }
      else if (char === ':') { key = begun.trim(); begun = ''; }
      else begun += char;
    }
    if (!stack.length) return null;
    for (const one of stack) path = [...path, ...(one.key !== undefined ? [one.key] : one.open === '[' ? [null] : [])];
    value = key !== null || stack[stack.length - 1].open === '[';
    if (key !== null) path = [...path, key];
    rest = begun;
  }
  return {path, begun: rest.trimStart(), value};
}

/** What may stand there: at most 12 entries of text and note. */
function completions(text) {
  const at = place(text);
  if (!at || /["'|>&*]/.test(at.begun)) return {begun: '', entries: []};
  const schemas = schemasAt(at.path);
  let entries;
  if (at.value) {
    const values = schemas.flatMap(one => [...(one.enum || []), ...('const' in one ? [one.const] : []),
      ...(one.type === 'boolean' ? [true, false] : [])]);
    const names = at.path.join('.') === 'model.name_or_path' ? catalogue.models : [];
    entries = [...new Set([...values, ...names])].filter(one => one !== null).map(one => ({text: String(one), note: ''}));
  } else {
    const properties = schemas.flatMap(one => Object.entries(one.properties || {}));
    entries = properties.map(([name, one]) => ({text: name, note: one.description || '', key: true}));
  }
  const begun = at.begun.toLowerCase();
  const fits = entries.filter(one => one.text.toLowerCase().includes(begun) && one.text !== at.begun);
  fits.sort((a, b) => b.text.toLowerCase().startsWith(begun) - a.text.toLowerCase().startsWith(begun));
  return {begun: at.begun, entries: fits.slice(0, 12)};
}

// --- the editor

class Editor {
  /** A textarea with line numbers, the problems of its recipe, and a list of completions. */
  constructor(number, recipe, changed) {
    this.recipe = recipe;
    this.changed = changed;
    this.area = make('textarea', {
      spellcheck: 'false', autocapitalize: 'off', autocomplete: 'off', wrap: 'off', rows: '18',
      id: `recipe-${number}`, 'aria-describedby': `problems-${number}`, 'aria-autocomplete': 'list',
      'aria-controls': `completions-${number}`,
    });
    this.area.value = recipe.text;
    this.gutter = make('div', {class: 'gutter', 'aria-hidden': 'true'});
    this.list = make('ul', {
      class: 'completions', role: 'listbox', id: `completions-${number}`, hidden: true, 'aria-label': 'Completions',
    });
    this.problems = make('ul', {class: 'problems', id: `problems-${number}`, 'aria-live': 'polite', 'aria-label': 'Problems of the recipe'});
    this.name = make('input', {
      type: 'text', value: recipe.path, 'aria-label': `Path of recipe ${number + 1}`, class: 'path', spellcheck: 'false',
      readOnly: Boolean(start.files === null && number === 0),
      onchange: () => { recipe.path = this.name.value || 'recipe.yaml'; changed(); },
    });
    const box = make('div', {class: 'editor'}, this.gutter, this.area, this.list);
    this.root = make('div', {class: 'recipe'},
      make('p', {class: 'name'}, make('label', {for: `recipe-${number}`}, number ? 'compared with ' : 'recipe '), this.name),
      box, this.problems);
    this.area.addEventListener('input', () => { recipe.text = this.area.value; this.number(); this.complete(); changed(); });
    this.area.addEventListener('scroll', () => { this.gutter.scrollTop = this.area.scrollTop; });
    this.area.addEventListener('keydown', event => this.key(event));
    this.area.addEventListener('blur', () => this.close());
    this.area.addEventListener('click', () => this.close());
    this.entries = [];
    this.lines = new Set();
    this.number();
  }

  set(text) {
    this.recipe.text = this.area.value = text;
    this.number();
  }

  /** Line numbers; a line with a problem is marked. */
  number() {
    const count = this.area.value.split('\n').length, drawn = [count, ...this.lines].join();
    if (drawn === this.drawn) return; // most keystrokes: thousands of numbers take longer than a plan
    this.drawn = drawn;
    const numbers = Array.from({length: count}, (_, at) => make('span',
      this.lines.has(at + 1) ? {class: 'wrong'} : {}, String(at + 1)));
    this.gutter.replaceChildren(...numbers);
    this.gutter.scrollTop = this.area.scrollTop;
  }

  show(problems) {
    this.lines = new Set(problems.map(one => one.line).filter(Boolean));
    this.number();
    this.area.setAttribute('aria-invalid', String(problems.length > 0));
    this.problems.replaceChildren(...problems.map(one => {
      const where = one.line ? make('button', {type: 'button', onclick: () => this.go(one.line)}, `line ${one.line}`) : '';
      return make('li', {'data-code': one.code}, where, one.line ? ' ' : '', one.path ? make('code', {}, one.path) : '',
        one.path ? ' ' : '', one.message, one.hint ? make('span', {class: 'soft'}, ` (${one.hint})`) : '');
    }));
  }

  go(line) {
    const before = this.area.value.split('\n').slice(0, line - 1).join('\n').length + (line > 1 ? 1 : 0);
    const end = this.area.value.indexOf('\n', before);
    this.area.focus();
    this.area.setSelectionRange(before, end < 0 ? this.area.value.length : end);
    this.area.scrollTop = Math.max(0, (line - 5) * this.height());
  }

  height() { return parseFloat(getComputedStyle(this.area).lineHeight); }

  complete() {
    const at = this.area.selectionStart, next = this.area.value[at];
    const found = !catalogue || at !== this.area.selectionEnd || (next && !/[\s,}\]]/.test(next))
      ? {entries: []} : completions(this.area.value.slice(0, at));
    if (!found.entries.length || (!found.begun && !this.asked)) { this.asked = false; return this.close(); }
    this.asked = false;
    this.begun = found.begun;
    this.entries = found.entries;
    this.list.replaceChildren(...found.entries.map((one, number) => make('li', {
      role: 'option', id: `${this.list.id}-${number}`, 'aria-selected': 'false',
      onmousedown: event => { event.preventDefault(); this.take(number); },
    }, make('b', {}, one.text), one.note ? make('span', {class: 'soft'}, ` ${one.note.split(/[.;\n]/)[0]}`) : '')));
    const lines = this.area.value.slice(0, at).split('\n');
    const wide = parseFloat(getComputedStyle(this.gutter).width);
    const left = wide + (lines[lines.length - 1].length - found.begun.length) * this.character() - this.area.scrollLeft;
    this.list.style.top = `${lines.length * this.height() - this.area.scrollTop + 10}px`;
    this.list.style.left = `${Math.max(0, Math.min(left, this.area.clientWidth - 120))}px`;
    this.list.hidden = false;
    this.choose(0);
  }

  character() {
    const paper = (this.paper ??= document.createElement('canvas').getContext('2d'));
    paper.font = getComputedStyle(this.area).font;
    return paper.measureText('m').width;
  }

  choose(number) {
    this.chosen = number;
    [...this.list.children].forEach((one, at) => one.setAttribute('aria-selected', String(at === number)));
    this.list.children[number].scrollIntoView({block: 'nearest'});
    this.area.setAttribute('aria-activedescendant', `${this.list.id}-${number}`);
  }

  take(number) {
    const {text, key} = this.entries[number];
    const from = this.area.selectionStart - this.begun.length;
    this.close();
    this.area.setRangeText(key ? `${text}: ` : text, from, this.area.selectionStart, 'end');
    this.area.dispatchEvent(new Event('input'));
  }

  close() {
    this.list.hidden = true;
    this.entries = [];
    this.area.removeAttribute('aria-activedescendant');
  }

  key(event) {
    const open = !this.list.hidden, many = this.entries.length;
    if (event.key === ' ' && event.ctrlKey) { event.preventDefault(); this.asked = true; this.complete(); }
    else if (open && event.key === 'ArrowDown') { event.preventDefault(); this.choose((this.chosen + 1) % many); }
    else if (open && event.key === 'ArrowUp') { event.preventDefault(); this.choose((this.chosen + many - 1) % many); }
    else if (open && event.key === 'Escape') { event.preventDefault(); this.close(); }
    else if (open && (event.key === 'Enter' || event.key === 'Tab') && !event.shiftKey) { event.preventDefault(); this.take(this.chosen); }
    else if (event.key === 'Enter' && !event.ctrlKey && !event.isComposing) {
      const line = this.area.value.slice(0, this.area.selectionStart).split('\n').pop();
      const indent = /^\s*/.exec(line)[0] + (/:\s*$/.test(line) ? '  ' : '');
      if (indent) {
        event.preventDefault();
        this.area.setRangeText(`\n${indent}`, this.area.selectionStart, this.area.selectionEnd, 'end');
        this.area.dispatchEvent(new Event('input'));
      }
    }
  }
}

let editors = [];

function drawRecipes() {
  editors = state.recipes.map((recipe, number) => new Editor(number, recipe, later));
  byId('recipes').replaceChildren(...editors.map(one => one.root));
  byId('compare').textContent = state.recipes.length > 1 ? 'Leave out the second recipe' : 'Compare with another recipe';
}

// --- hardware and sliders

function parts(on) {
  const found = /^(?:(\d+)x)?(\d+)x(.+)$/.exec(on);
  return found ? {nodes: Number(found[1] || 1), count: Number(found[2]), device: found[3]} : {nodes: 1, count: 1, device: on};
}

const notation = ({nodes, count, device}) => (nodes > 1 ? `${nodes}x` : '') + `${count}x${device}`;

function hardwareRow(on, number) {
  const now = parts(on);
  const changed = () => { state.on[number] = notation(now); later(); };
  const names = [...catalogue.devices];
  if (!names.includes(now.device)) names.unshift(now.device);
  const device = make('select', {onchange: () => { now.device = device.value; changed(); }},
    ...names.map(name => make('option', {value: name, selected: name === now.device}, name)));
  const amount = (key, most) => {
    const field = make('input', {type: 'number', min: '1', max: String(most), value: String(now[key]), oninput: () => {
      now[key] = Math.min(most, Math.max(1, Math.round(Number(field.value)) || 1)); changed();
    }});
    return field;
  };
  const leave = make('button', {type: 'button', 'aria-label': `Leave out ${on}`, disabled: state.on.length === 1, onclick: () => {
    state.on.splice(number, 1); selected = 0; drawHardware(); later();
  }}, '✕');
  return make('fieldset', {class: 'hardware'}, make('legend', {class: 'hidden'}, `Hardware ${number + 1}`),
    make('label', {}, 'device ', device), make('label', {}, 'in a node ', amount('count', 64)),
    make('label', {}, 'nodes ', amount('nodes', 1024)), leave);
}

const drawHardware = () => byId('hardware').replaceChildren(...state.on.map(hardwareRow));

function slider({key, name, values}) {
  const now = values.findIndex(value => String(value) === state.sets[key]);
  const text = at => (at ? String(values[at - 1]) : state.sets[key] ?? 'as in the recipe');
  const shown = make('output', {}, text(now + 1));
  const range = make('input', {
    type: 'range', min: '0', max: String(values.length), step: '1', value: String(now + 1), 'data-key': key,
    'aria-valuetext': text(now + 1),
    oninput: () => {
      const at = Number(range.value);
      if (at) state.sets[key] = String(values[at - 1]);
      else delete state.sets[key];
      shown.textContent = text(at);
      range.setAttribute('aria-valuetext', text(at));
      drawSets();
      later();
    },
  });
  range.value = String(now + 1);
  return make('label', {class: 'slider'}, make('span', {}, name), shown, range);
}

function drawSets() {
  byId('sets').replaceChildren(...Object.entries(state.sets).map(([key, value]) => make('li', {},
    make('code', {}, `${key}=${value}`), make('button', {type: 'button', 'aria-label': `Take back ${key}`, onclick: () => {
      delete state.sets[key]; drawSliders(); later();
    }}, '✕'))));
}

function drawSliders() {
  byId('sliders').replaceChildren(...SLIDERS.map(slider));
  drawSets();
}

// --- plans

const sets = () => Object.entries(state.sets).map(([key, value]) => `${key}=${value}`);
const columns = () => state.recipes.flatMap((recipe, which) => state.on.map(on => ({which, recipe, on})));

function columnName({recipe, on}) {
  const name = recipe.path.split('/').pop().replace(/\.ya?ml$/, '');
  return state.recipes.length > 1 ? `${name} on ${on}` : on;
}

let number = 0, waiting;
const asked = new Set(); // names of models that were planned
let answers = []; // one a column, undefined where it is not there yet
let answered = []; // the columns of `answers`

function later() {
  clearTimeout(waiting);
  const names = start.files === null ? state.recipes.map(one => modelOf(one.text)) : [];
  const asksHub = names.some(name => name && !catalogue.models.includes(name) && !asked.has(name));
  waiting = setTimeout(renew, asksHub ? NAME_PAUSE_MS : PAUSE_MS);
}

/** The model that a recipe names, where it names one in a line of its own or in `model: {…}`. */
function modelOf(text) {
  const found = /^\s*(?:model\s*:\s*\{.*?)?name_or_path\s*:\s*["']?([^"'\s,}#]+)/m.exec(text);
  return found ? found[1] : null;
}

let asking = new AbortController(), turn = Promise.resolve();

/** One plan after the other: a state that is older than the newest when its turn comes is not planned. */
function planOf(mine, question) {
  const {signal} = asking;
  const answer = turn.then(() => (mine === number ? ask(question, signal) : null));
  turn = answer.catch(() => null);
  return answer;
}

/** Ask for every column again. Answers to what was asked before are left out. */
async function renew() {
  const mine = ++number, all = columns();
  for (const one of state.recipes) asked.add(modelOf(one.text));
  asking.abort();
  asking = new AbortController();
  if (selected >= all.length) selected = 0;
  keepLink();
  const found = new Array(all.length);
  const order = [selected, ...all.keys()].filter((at, where, list) => list.indexOf(at) === where);
  for (const at of order) {
    const {recipe, on} = all[at];
    try {
      found[at] = await planOf(mine, {ask: 'plan', path: recipe.path, text: recipe.text, sets: sets(), on, configs: state.configs});
    } catch (error) {
      const hint = start.files === null ? 'effilaunch plan --browser must be running' : 'load the page again';
      found[at] = {status: 70, problems: [{code: 'no-answer', message: `no answer: ${error.message}`, hint}], json: ''};
    }
    if (mine !== number) return;
    answers = found;
    answered = all;
    if (at === selected) drawDetails();
    await drawVerdicts(all);
    if (mine !== number) return;
  }
  document.body.dataset.planned = String(mine);
}

const verdict = answer => answer === undefined ? ['…', '']
  : answer.status === 0 ? (answer.fits === null ? ['size unknown', 'stopped'] : ['✓ fits', 'finished'])
  : answer.status === 3 ? ['✕ does not fit', 'failed'] : ['✕ error', 'failed'];

async function drawVerdicts(all) {
  const mine = number;
  editors.forEach((editor, which) => {
    const of = all.findIndex((one, at) => one.which === which && answers[at]);
    const problems = of < 0 || answers[of].status === 3 ? [] : answers[of].problems;
    editor.show(problems.filter(one => one.file === null || one.file === editor.recipe.path));
  });
  const shown = all.map((one, at) => ({name: columnName(one), memory: answers[at]?.memory})).filter(one => one.memory);
  const {chart} = await ask({ask: 'chart', columns: shown}).catch(() => ({chart: ''})); // the verdicts tell why
  if (mine !== number) return;
  byId('chart').innerHTML = chart; // escaped by the planner
  drawTable(all);
}

function drawTable(all) {
  const drawn = number;
  const head = all.map((one, at) => make('th', {scope: 'col'}, make('button', {
    type: 'button', 'aria-pressed': String(at === selected), class: 'column', onclick: () => {
      if (drawn !== number) return; // other columns are being planned
      selected = at; drawDetails(); drawTable(all);
    },
  }, columnName(one))));
  const states = answers.length ? all.map((_, at) => verdict(answers[at])) : [];
  const names = [...new Set(answers.flatMap(one => (one?.facts || []).map(([name]) => name)))];
  const rows = names.map(name => {
    const cells = all.map((_, at) => (answers[at]?.facts || []).find(([key]) => key === name));
    const values = cells.flatMap((cell, at) => (answers[at]?.facts ? [cell ? cell[1] : '–'] : []));
    const differ = new Set(values).size > 1;
    return make('tr', differ ? {class: 'differ'} : {}, make('th', {scope: 'row'}, name.includes('.') ? make('code', {}, name) : name),
      ...cells.map(cell => make('td', {}, cell ? make('b', {}, cell[1]) : '–',
        cell && cell[2] ? make('span', {class: 'soft small'}, ` ${cell[2]}`) : '')));
  });
  const first = make('tr', {}, make('th', {scope: 'row'}, 'Verdict'),
    ...states.map(([text, kind]) => make('td', {}, make('span', {class: `state ${kind}`}, text))));
  byId('summary').textContent = all[selected] ? `${columnName(all[selected])}: ${states[selected]?.[0] ?? '…'}` : '…';
  byId('table').replaceChildren(make('div', {class: 'wide', role: 'region', 'aria-label': 'Plans side by side', tabindex: '0'},
    make('table', {class: 'compared'}, make('caption', {}, make('span', {class: 'hidden'}, 'Plans side by side')),
      make('thead', {}, make('tr', {}, make('th', {scope: 'col'}, 'plan'), ...head)), make('tbody', {}, first, ...rows))));
}

/** The details of the selected column: problems, what would fit, sections, files. */
function drawDetails() {
  const column = answered[selected], answer = answers[selected];
  if (!answer) return;
  const elsewhere = answer.problems.filter(one => answer.status === 3 || (one.file !== null && one.file !== column.recipe.path)
    || (one.file === null && (one.path || '').startsWith('--')));
  const messages = elsewhere.map(one => make('p', {'data-code': one.code}, `${one.path ? `${one.path}: ` : ''}${one.message}`,
    answer.changes?.length || !one.hint ? '' : ` (${one.hint})`));
  const changes = (answer.changes || []).map(one => make('li', {}, `${one.text} `, make('button', {type: 'button', onclick: () => apply(one.change, column)}, 'Try it')));
  byId('problems').replaceChildren(...(messages.length ? [make('div', {class: 'card bad'}, make('h3', {}, answer.status === 3 ? 'It does not fit' : 'An error'),
    ...messages, changes.length ? make('p', {}, 'It would fit') : '', changes.length ? make('ul', {class: 'plain'}, ...changes) : '')] : []));
  byId('sections').innerHTML = answer.sections || ''; // escaped by the planner
  drawFiles(column, answer);
}

function apply(change, column) {
  for (const [key, value] of Object.entries(change)) {
    if (key === 'on') state.on[state.on.indexOf(column.on)] = value;
    else state.sets[key] = value === null ? 'null' : typeof value === 'string' ? value : JSON.stringify(value);
  }
  drawHardware();
  drawSliders();
  later();
}

const quoted = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    said('copied');
  } catch {
    said('the browser does not allow copying');
  }
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], {type: 'text/plain'}));
  make('a', {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function fileOf(name, text, open) {
  const shown = make('pre', {tabindex: '0', role: 'region', 'aria-label': name}, make('code', {}, text));
  return make('details', {open, 'data-name': name}, make('summary', {}, name), make('p', {class: 'buttons'},
    make('button', {type: 'button', onclick: () => copy(text), 'aria-label': `Copy ${name}`}, 'Copy'),
    make('button', {type: 'button', onclick: () => download(name, text), 'aria-label': `Download ${name}`}, 'Download')), shown);
}

/** What the command line does not have of what was planned. */
function unsaid({recipe}) {
  const isOnDisk = start.files === null && recipe.path === start.path && recipe.text === start.text;
  return [
    ...(isOnDisk ? [] : [`Save the text of the recipe as ${recipe.path} first: the command reads that file, not this page.`]),
    ...(Object.keys(state.configs).length ? ['The command reads the configuration of the model, not the pasted one.'] : []),
  ];
}

function drawFiles(column, answer) {
  const opened = new Set([...byId('files').querySelectorAll('details[open]')].map(one => one.dataset.name));
  const words = ['effilaunch', 'run', column.recipe.path, '--on', column.on, ...sets().flatMap(one => ['--set', one])];
  const files = {'command line': words.map(quoted).join(' '), ...answer.files};
  if (answer.json) files['plan --json'] = answer.json;
  byId('files').replaceChildren(...unsaid(column).map(text => make('p', {class: 'small'}, text)), ...Object.entries(files).map(([name, text]) => fileOf(name, text, opened.has(name) || (name === 'command line' && !opened.size))));
}

// --- what the buttons do

function useConfig(text) {
  const say = words => { byId('config-said').textContent = words; };
  const model = modelOf(state.recipes[0].text);
  if (!text.trim()) { state.configs = {}; say(''); return later(); }
  let config;
  try {
    config = JSON.parse(text);
  } catch (error) {
    return say(`not JSON: ${error.message}`);
  }
  if (!config || typeof config !== 'object' || Array.isArray(config) || typeof config.model_type !== 'string') {
    return say('a config.json is an object with a model_type');
  }
  if (!model) return say('the recipe names no model.name_or_path, for which it would count');
  state.configs = {[model]: config};
  say(`${config.model_type}: counts for ${model}`);
  later();
}

function openRecipe(path, text) {
  if (!(start.files === null && path !== start.path)) state.recipes[0].path = path;
  editors[0].name.value = state.recipes[0].path;
  editors[0].set(text);
  later();
}

function listen() {
  byId('add-hardware').addEventListener('click', () => { state.on.push(state.on.at(-1)); drawHardware(); later(); });
  byId('shipped').append(make('option', {value: ''}, 'a shipped recipe'),
    ...Object.keys(catalogue.recipes).map(name => make('option', {value: name}, name)));
  byId('shipped').addEventListener('change', event => {
    const name = event.target.value;
    if (name) openRecipe(`${name.split('/').pop()}.yaml`, catalogue.recipes[name]);
    event.target.value = '';
  });
  byId('open').addEventListener('click', () => byId('file').click());
  byId('file').addEventListener('change', async event => {
    const [file] = event.target.files;
    if (file) openRecipe(file.name, await file.text());
    event.target.value = '';
  });
  byId('compare').addEventListener('click', () => {
    if (state.recipes.length > 1) state.recipes.pop();
    else state.recipes.push({path: state.recipes[0].path.replace(/(\.ya?ml)?$/, '-2.yaml'), text: state.recipes[0].text});
    selected = 0;
    drawRecipes();
    later();
  });
  byId('link').addEventListener('click', async () => { await keepLink(); copy(location.href); });
  byId('config').addEventListener('input', event => useConfig(event.target.value));
  byId('config').addEventListener('dragover', event => event.preventDefault());
  byId('config').addEventListener('drop', async event => {
    const [file] = event.dataTransfer.files;
    if (!file) return;
    event.preventDefault();
    useConfig(byId('config').value = await file.text());
  });
  window.addEventListener('hashchange', async () => {
    const given = location.hash === ownHash ? null : await linked();
    if (given) await begin(given);
  });
  byId('summary').addEventListener('click', event => {
    event.preventDefault(); // the fragment is the state
    byId('verdict-heading').scrollIntoView();
  });
}

async function begin(given) {
  const own = {recipes: [{path: start.path, text: start.text}], on: [...start.on],
    sets: Object.fromEntries(start.sets.map(one => [one.slice(0, one.indexOf('=')), one.slice(one.indexOf('=') + 1)])), configs: {}};
  Object.assign(state, given || own);
  selected = 0;
  const [config] = Object.values(state.configs);
  byId('config').value = config ? JSON.stringify(config, null, 2) : '';
  byId('config-said').textContent = '';
  drawRecipes();
  drawHardware();
  drawSliders();
  await renew();
}

try {
  await (start.files === null ? serverPlanner() : workerPlanner());
  catalogue = await ask({ask: 'catalogue'});
  byId('loading-row').hidden = true;
  listen();
  await begin(await linked());
} catch (error) {
  byId('loading').hidden = true;
  byId('loading-text').textContent = `The planner could not be loaded: ${error.message}`;
}
