"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const { steps, geometry, occupancy, skipped } = data;
const $ = (id) => document.getElementById(id);
let group = 0, size = geometry.block_sizes[0];  // the cache group that is shown
let at = 0, token = null, request = null, cells = [], pages = new Map();

// The same hue for a request in every step.
const hues = new Map();
const hue = (id) => { if (!hues.has(id)) hues.set(id, (hues.size * 137.508) % 360); return hues.get(id); };
const colour = (id, light = 78) => `hsl(${hue(id)} 70% ${light}%)`;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
const cdiv = (a, b) => Math.floor((a + b - 1) / b);
const step = () => steps[at];
const rowOf = (t) => step().req_indices[t];
const blocksOf = (row) => step().block_rows[group][row];

// What a redraw replaces keeps the keyboard's focus: the cell of the same data, or name, gets it.
const places = (element) => Object.entries(element.dataset).map(([k, v]) => `[data-${k}="${CSS.escape(v)}"]`).join("");
function show(number) {
  const focused = document.activeElement, place = focused && focused.closest("#stage") ? places(focused) : "";
  redraw(number);
  if (place) document.querySelector(place)?.focus({ preventScroll: true });
}

function redraw(number) {
  at = Math.max(0, Math.min(steps.length - 1, number));
  const s = step(), ids = s.req_ids;
  $("slider").value = at;
  const bucket = s.bucket ? `${s.num_tokens} tokens in ${s.bucket.tokens}, ${ids.length} rows in ${s.bucket.requests} ${s.mode || ""}` : "nothing scheduled";
  const gone = [["finished", s.plan.finished_req_ids], ["preempted", s.plan.preempted_req_ids]].filter(([, l]) => l.length).map(([w, l]) => `; ${w}: ${l.join(", ")}`).join("");
  $("where").textContent = `step ${s.step} of ${steps[steps.length - 1].step}: ${bucket}${gone}${s.error ? `; failed: ${s.error}` : ""}`;
  if (!ids.includes(request)) request = ids.length ? ids[0] : request;
  if (token !== null && !(s.num_tokens > token)) token = null;
  drawStream(); drawTables(); drawRows(); drawTokens(); drawTimeline(); drawPool(); drawArrows();
}

function drawStream() {
  const s = step(), stream = $("stream");
  cells = [];
  if (!s.bucket) { stream.replaceChildren(); return; }
  const picks = new Set(s.logits_indices.slice(0, s.num_logits));
  for (let t = 0; t < s.bucket.tokens; t++) {
    const real = t < s.num_tokens, row = real ? rowOf(t) : null, cell = make("button", "token");
    cell.dataset.token = t;
    if (real) {
      const id = s.req_ids[row];
      cell.style.background = colour(id);
      cell.textContent = s.positions[t];
      cell.title = `token ${t}: ${id}, position ${s.positions[t]}`;
      if (t === s.query_start_loc[row]) cell.classList.add("first");
      if (picks.has(t)) { cell.classList.add("pick"); if (s.discard[row]) cell.classList.add("discarded"); }
    } else { cell.classList.add("padding"); cell.title = `token ${t}: padding`; cell.tabIndex = -1; }
    cell.setAttribute("aria-pressed", t === token);
    cell.onclick = () => pick(t);
    cells.push(cell);
  }
  stream.replaceChildren(...cells);
}

function drawTables() {
  const s = step(), lines = [];
  pages = new Map();
  s.req_ids.forEach((id, row) => {
    const line = make("div", "row"), name = make("button", "name", id), list = make("div", "pages");
    name.style.background = colour(id, 90);
    name.dataset.request = row;
    name.onclick = () => { request = id; token = s.query_start_loc[row]; show(at); explainToken(token); };
    if (id === request) name.classList.add("selected");
    blocksOf(row).forEach((block, logical) => {
      const page = make("button", "page", block), first = logical * size;
      const old = Math.max(0, Math.min(size, s.computed[row] - first)) / size * 100;
      const now = Math.max(0, Math.min(size, s.seq_lens[row] - first)) / size * 100;
      page.style.background = `linear-gradient(90deg, ${colour(id, 86)} ${old}%, ${colour(id, 62)} ${old}% ${now}%, #fff ${now}%)`;
      if (now > old) page.classList.add("written");
      if (token !== null && rowOf(token) === row && first <= s.positions[token]) page.classList.add("seen");
      page.title = `block ${block}: positions ${first} to ${first + size - 1} of ${id}`;
      page.onclick = () => explain(`block_table[${row}][${logical}]`, block,
        `block_table[row ${row}, ${id}][logical block ${logical}] = ${block}`,
        `It holds positions ${logical} * ${size} to ${logical} * ${size} + ${size - 1}, KV slots ${block * size} to ${block * size + size - 1}. ${Math.round(now / 100 * size)} of ${size} are filled after the step.`);
      pages.set(`${row}/${logical}`, page);
      list.append(page);
    });
    const more = s.block_row_lengths[group][row] - blocksOf(row).length;
    if (more > 0) list.append(make("span", "", `and ${more} more`));
    line.append(name, list);
    lines.push(line);
  });
  $("tables").replaceChildren(...lines);
}

const ROW_FIELDS = ["request_indices", "scheduled", "computed", "known", "prompt", "drafts", "query_start_loc", "seq_lens", "discard", "logits", "sampled"];
function rowValue(s, field, row) {
  if (field === "query_start_loc") return `${s.query_start_loc[row]}, ${s.query_start_loc[row + 1]}`;
  if (field === "logits") return picksOf(s, row).join(" ");
  if (field === "sampled") return (s.sampled[row] || []).join(" ");
  if (field === "discard") return s.discard[row] ? "yes" : "no";
  return s[field][row];
}
const picksOf = (s, row) => s.logits_indices.slice(0, s.num_logits).filter((p) => p >= s.query_start_loc[row] && p < s.query_start_loc[row + 1]);

function drawRows() {
  const s = step(), table = make("table"), head = table.createTHead().insertRow();
  for (const name of ["row", "request", ...ROW_FIELDS]) head.append(make("th", "", name));
  const body = table.createTBody();
  s.req_ids.forEach((id, row) => {
    const line = body.insertRow();
    line.style.background = colour(id, 95);
    line.insertCell().textContent = row;
    line.insertCell().textContent = id;
    for (const field of ROW_FIELDS) {
      const button = make("button", "", rowValue(s, field, row));
      if (button.textContent === "") button.textContent = "-";
      button.dataset.field = field; button.dataset.row = row;
      button.onclick = () => { request = id; explainRow(field, row); };
      line.insertCell().append(button);
    }
  });
  $("rows").replaceChildren(table);
}

function drawTokens() {
  const s = step(), row = s.req_ids.indexOf(request);
  $("whose").textContent = request ?? "no request";
  if (row < 0) { $("tokens").replaceChildren(make("p", "legend", "not in this step")); return; }
  const table = make("table"), head = table.createTHead().insertRow();
  const fields = ["token", "query_pos", "token_ids", "req_indices", "positions", "logical block", "slot_mapping"];
  for (const name of fields) head.append(make("th", "", name));
  const body = table.createTBody();
  for (let t = s.query_start_loc[row]; t < s.query_start_loc[row + 1]; t++) {
    const line = body.insertRow();
    if (t === token) line.className = "selected";
    const values = [t, t - s.query_start_loc[row], s.token_ids[t], s.req_indices[t], s.positions[t], Math.floor(s.positions[t] / size), s.slot_mapping[group][t]];
    values.forEach((value, i) => {
      const button = make("button", "", value);
      button.dataset.field = fields[i]; button.dataset.cell = t;
      button.onclick = () => { token = t; show(at); explainCell(fields[i], t); };
      line.insertCell().append(button);
    });
  }
  $("tokens").replaceChildren(table);
}

function explain(what, value, formula, why) {
  const code = make("code", "", formula);
  $("explanation").replaceChildren(make("strong", "", `${what} = ${value}`), code, make("div", "", why || ""));
}

function explainRow(field, row) {
  const s = step(), id = s.req_ids[row], q = s.query_start_loc, n = s.scheduled[row], c = s.computed[row];
  const name = `${field}[${row}]`, value = rowValue(s, field, row), last = q[row + 1] - 1;
  const texts = {
    request_indices: ["given once, when the request enters the batch", `Row ${row} is only a place in this step; index ${value} is where ${id}'s state lies on the device, until it finishes or is preempted.`],
    scheduled: [`num_scheduled_tokens["${id}"] = ${n}`, "What the scheduler planned for this step, drafts included."],
    computed: [`num_computed_tokens of ${id} = ${c}`, "Tokens whose keys and values exist before the step. It says where to go on, not how much of the history may be forgotten."],
    known: [`prompt + outputs so far = ${s.prompt[row]} + ${s.known[row] - s.prompt[row]} = ${s.known[row]}`, "Tokens that the request has; drafts are not counted."],
    prompt: [`len(prompt_token_ids) = ${value}`, c < s.prompt[row] ? "Not all computed yet: this row prefills." : "All computed: this row decodes."],
    drafts: [`len(scheduled_spec_decode_tokens["${id}"]) = ${value}`, "Draft tokens at the end of the interval."],
    query_start_loc: [`query_start_loc[${row + 1}] = query_start_loc[${row}] + scheduled[${row}] = ${q[row]} + ${n} = ${q[row + 1]}`, `Row ${row} owns tokens ${q[row]} to ${last}.`],
    seq_lens: [`seq_lens[${row}] = computed[${row}] + scheduled[${row}] = ${c} + ${n} = ${s.seq_lens[row]}`, "How many keys attention may read of this sequence after the step."],
    discard: [`discard[${row}] = seq_lens[${row}] < known[${row}] = ${s.seq_lens[row]} < ${s.known[row]} = ${s.discard[row]}`, s.discard[row] ? "Known tokens remain to be computed: the sample must not count. How many tokens were scheduled does not matter." : "All known tokens are computed: the sample is the next token."],
    logits: [`the last 1 + drafts tokens: query_start_loc[${row + 1}] - 1 - ${s.drafts[row]} ... ${q[row + 1]} - 1 = ${value}`, "Only these hidden states go through the head."],
    sampled: [value === "" ? "nothing" : `${value}`, s.discard[row] ? "The row's sample was discarded." : "Tokens that the row committed."],
  };
  explain(name, value === "" ? "-" : value, ...texts[field]);
}

function explainCell(field, t) {
  const s = step(), row = rowOf(t), id = s.req_ids[row], p = s.positions[t], q = s.query_start_loc[row], offset = t - q;
  const logical = Math.floor(p / size), slot = s.slot_mapping[group][t];
  const block = blocksOf(row)[logical] ?? Math.floor(slot / size);  // a long row is cut in the trace
  const texts = {
    token: [`token ${t} of the flat stream`, `It belongs to row ${row}, ${id}.`],
    query_pos: [`query_pos[${t}] = ${t} - query_start_loc[${row}] = ${t} - ${q} = ${offset}`, "Offset within the row's interval."],
    token_ids: [`token_ids[${t}] = tokens of ${id} at position ${p}`, s.use_device[row] && t === s.query_start_loc[row + 1] - 1 - s.drafts[row] ? "Taken from the device's last sample." : "Gathered from the request's history."],
    req_indices: [`req_indices[${t}] = ${row}, since query_start_loc[${row}] = ${q} <= ${t} < ${s.query_start_loc[row + 1]}`, ""],
    positions: [`positions[${t}] = computed[${row}] + query_pos[${t}] = ${s.computed[row]} + ${offset} = ${p}`, "The token's place in its request; rotary embedding and KV slot follow from it."],
    "logical block": [`positions[${t}] // ${size} = ${p} // ${size} = ${logical}`, ""],
    slot_mapping: [`slot = block_table[row][position // ${size}] * ${size} + position % ${size}\n     = block_table[${row}][${logical}] * ${size} + ${p % size}\n     = ${block} * ${size} + ${p % size} = ${slot}`, "Where this token's key and value are written."],
  };
  const values = { token: t, query_pos: offset, token_ids: s.token_ids[t], req_indices: row, positions: p, "logical block": logical, slot_mapping: slot };
  explain(`${field}[${t}]`, values[field], ...texts[field]);
}

function explainToken(t) {
  const s = step();
  if (t >= s.num_tokens) { explain(`token ${t}`, "padding", `slot_mapping[${t}] = ${s.slot_mapping[group][t]}`, "The bucket is larger than the step. No slot, so it writes nothing; its result is read by nobody."); return; }
  const row = rowOf(t), p = s.positions[t];
  explainCell("slot_mapping", t);
  const sees = make("div", "", `It sees keys 0 to ${p} of ${s.req_ids[row]}: position ${p} + 1 = ${p + 1} of them, in ${cdiv(p + 1, size)} pages, and nothing of any other request.`);
  sees.id = "sees";
  $("explanation").append(sees);
}

function pick(t) {
  const s = step();
  token = t;
  if (t < s.num_tokens) request = s.req_ids[rowOf(t)];
  show(at);
  if (t >= s.num_tokens) token = null;
  explainToken(t);
}

function drawArrows() {
  const s = step(), svg = $("arrows"), origin = svg.getBoundingClientRect(), shapes = [];
  if (s.bucket && token !== null) {
    const row = rowOf(token), q = s.query_start_loc, own = [];
    for (let t = q[row]; t < Math.min(q[row + 1], q[row] + 64); t++) own.push(t);
    for (const t of own) {
      const page = pages.get(`${row}/${Math.floor(s.positions[t] / size)}`), cell = cells[t];
      if (!page || !cell) continue;
      const a = cell.getBoundingClientRect(), b = page.getBoundingClientRect();
      const x = b.left + b.width * ((s.positions[t] % size) + 0.5) / size;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      const [x1, y1, x2, y2] = [a.left + a.width / 2 - origin.left, a.bottom - origin.top, x - origin.left, b.top - origin.top];
      path.setAttribute("d", `M${x1},${y1} C${x1},${(y1 + y2) / 2} ${x2},${(y1 + y2) / 2} ${x2},${y2}`);
      path.setAttribute("fill", "none");
      path.setAttribute("stroke", t === token ? "#111" : colour(s.req_ids[row], 50));
      path.setAttribute("stroke-width", t === token ? 2.5 : 1);
      shapes.push(path);
    }
  }
  svg.replaceChildren(...shapes);
}

function phase(s, id) {
  if (s.plan.preempted_req_ids.includes(id)) return ["#b3261e", "preempted"];
  const row = s.req_ids.indexOf(id);
  if (row < 0) return ["#dfe3e8", "not in the step"];
  return s.computed[row] < s.prompt[row] ? ["#f4b942", `prompt, ${s.scheduled[row]} tokens`] : ["#4c9f70", `decode, ${s.scheduled[row]} token`];
}

function drawTimeline() {
  $("life").textContent = request ?? "no request";
  const buttons = steps.map((s, i) => {
    const [background, text] = phase(s, request), button = make("button", i === at ? "now" : "");
    button.style.background = background;
    button.title = `step ${s.step}: ${text}`;
    button.setAttribute("aria-label", button.title);
    button.tabIndex = -1;
    button.onclick = () => show(i);
    return button;
  });
  $("timeline").replaceChildren(...buttons);
}

function drawPool() {
  const svg = $("pool"), n = Math.max(steps.length - 1, 1), held = occupancy[group], most = Math.max(...held, 1);
  const top = geometry.num_blocks ? geometry.num_blocks - 1 : most;
  svg.setAttribute("viewBox", `0 0 ${n} ${top}`);
  const points = held.map((blocks, i) => `${i},${top - blocks}`).join(" ");
  svg.innerHTML = `<polygon points="0,${top} ${points} ${n},${top}" fill="#bcd4ee"/><line x1="${at}" x2="${at}" y1="0" y2="${top}" stroke="#111" vector-effect="non-scaling-stroke"/>`;
  $("poolText").textContent = `${held[at]} of ${top} blocks held in this step, ${most} at most`;
}

function choose(number) {
  group = number;
  size = geometry.block_sizes[group];
  $("title").textContent = `${data.name}: ${steps.length} steps${skipped ? ` (${skipped} more are left out)` : ""}, blocks of ${size}`;
  show(at);
  if (token !== null) explainToken(token);
}
$("group").append(...geometry.block_sizes.map((blocks, g) => new Option(`cache group ${g}: blocks of ${blocks}`, g)));
$("group").hidden = geometry.block_sizes.length < 2;
$("group").onchange = (event) => choose(Number(event.target.value));
$("slider").max = steps.length - 1;
$("slider").oninput = (event) => show(Number(event.target.value));
$("previous").onclick = () => show(at - 1);
$("next").onclick = () => show(at + 1);
addEventListener("resize", drawArrows);
addEventListener("keydown", (event) => {
  if (["slider", "group"].includes(event.target.id) || event.ctrlKey || event.metaKey || event.altKey) return;
  const used = step().num_tokens || 0;
  const moves = { ArrowLeft: () => show(at - 1), ArrowRight: () => show(at + 1), Home: () => show(0), End: () => show(steps.length - 1),
    ArrowDown: () => used && pick(token === null ? 0 : Math.min(token + 1, used - 1)), ArrowUp: () => used && pick(token === null ? 0 : Math.max(token - 1, 0)) };
  if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
});
choose(0);
