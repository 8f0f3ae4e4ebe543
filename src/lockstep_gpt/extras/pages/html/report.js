// The report: tables that describe the runs, and their curves in shared charts.

const { runs } = JSON.parse(document.getElementById("data").textContent);
const state = { axis: 0, log: false };
const element = (id) => document.getElementById(id);
const ORDER = [
  "train/loss",
  "val/loss",
  "optim/lr",
  "optim/grad_norm",
  "throughput/tokens_per_second",
];
const VALUE = 2; // index into a point: step, tokens, value

function make(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Return a table with a row per key and a column per run; rows that differ are highlighted. */
function table(columns, cell = (value) => String(value ?? "")) {
  const keys = [...new Set(columns.flatMap((column) => Object.keys(column)))];
  const heads = runs.map((run) => make("th", { scope: "col", textContent: run.name }));
  const rows = keys.map((key) => {
    const values = columns.map((column) => cell(column[key], key));
    const row = make("tr", {}, [make("th", { scope: "row", textContent: key })]);
    row.append(...values.map((value) => make("td", {}, [value])));
    row.classList.toggle(
      "differs",
      values.some((value) => String(value) !== String(values[0])),
    );
    return row;
  });
  const head = runs.length > 1 ? [make("thead", {}, [make("tr", {}, [make("th"), ...heads])])] : [];
  return make("table", {}, [...head, make("tbody", {}, rows)]);
}

function number(value, most = 4) {
  if (value === null || value === undefined) return "";
  const digits = Math.abs(value) >= 1000 ? 0 : most;
  return value.toLocaleString("en", {
    maximumFractionDigits: digits,
    maximumSignificantDigits: Math.abs(value) < 0.1 ? 4 : undefined,
  });
}

function lastOf(run, name) {
  const rows = run.curves[name];
  return rows ? rows[rows.length - 1] : null;
}

/** Return the smallest value of a curve and its step, as text. */
function lowest(run, name) {
  const rows = (run.curves[name] ?? []).filter((row) => row[VALUE] !== null);
  if (rows.length === 0) return "";
  const best = rows.reduce((least, row) => (row[VALUE] < least[VALUE] ? row : least));
  return `${number(best[VALUE])} at step ${number(best[0])}`;
}

function outcomeOf(run) {
  const rows = Object.values(run.curves).map((curve) => curve[curve.length - 1]);
  const last = rows.reduce((latest, row) => (row[0] > latest[0] ? row : latest), [0, 0, null]);
  return {
    status: run.status,
    steps: number(last[0]),
    tokens: number(last[1]),
    "lowest validation loss": lowest(run, "val/loss"),
    "last training loss": number(lastOf(run, "train/loss")?.[VALUE]),
    "mean tokens per second": number(
      run.summary.tokens_per_second ?? lastOf(run, "throughput/tokens_per_second")?.[VALUE],
    ),
    "wall seconds of the last start": number(run.summary.wall_seconds, 1),
    starts:
      run.starts > 1
        ? `${run.starts}: it was resumed or restarted ${run.starts === 2 ? "once" : `${run.starts - 1} times`}`
        : number(run.starts),
    "skipped updates": number(lastOf(run, "optim/skipped")?.[VALUE]),
    "changed on resume": run.changes.join("; "),
  };
}

/** Return the results of one run as a list, or of several runs as a table. */
function outcome() {
  const columns = runs.map(outcomeOf);
  const keys = Object.keys(columns[0]).filter((key) =>
    columns.some((column) => column[key] !== ""),
  );
  const filled = columns.map((column) => Object.fromEntries(keys.map((key) => [key, column[key]])));
  if (runs.length > 1) return table(filled);
  const pairs = keys.map((key) =>
    make("div", {}, [
      make("dt", { textContent: key }),
      make("dd", { textContent: filled[0][key] }),
    ]),
  );
  return make("dl", { className: "tiles" }, pairs);
}

// ---- curves ----

function namesOfCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].filter(
    (name) => name !== "optim/skipped" || runs.some((run) => lastOf(run, name)?.[VALUE] > 0),
  );
  const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return names.sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
}

function pointsOf(run, name) {
  const usable = (row) => row[state.axis] !== null && !(state.log && row[VALUE] <= 0);
  return (run.curves[name] ?? []).filter(usable).map((row) => [row[state.axis], row[VALUE]]);
}

/** Return each run's value at `place` on the axis as text; null: its last value. */
function readout(series, place) {
  return series
    .map((points, index) => {
      const known = points.filter(([, value]) => value !== null);
      if (known.length === 0) return "";
      const distance = (point) => Math.abs(point[0] - (place ?? Infinity));
      const nearest =
        place === null
          ? known[known.length - 1]
          : known.reduce((best, each) => (distance(each) < distance(best) ? each : best));
      const who = runs.length > 1 ? `${runs[index].name} ` : "";
      return `${who}${number(nearest[1])} at ${number(nearest[0])}`;
    })
    .filter(Boolean)
    .join(", ");
}

function curve(name) {
  const series = runs.map((run) => pointsOf(run, name));
  const said = make("span", { textContent: readout(series, null) });
  const figure = make("figure", { tabIndex: 0 }, [
    make("figcaption", {}, [make("b", { textContent: name }), said]),
  ]);
  figure.setAttribute("aria-label", `${name}: ${said.textContent}`);
  element("curves").append(figure);
  if (series.flat().filter(([, value]) => value !== null).length === 0) return;
  const label = `${name} over ${state.axis ? "tokens" : "steps"}; last: ${said.textContent}`;
  const width = figure.clientWidth - 26;
  const chart = lineChart({ series, label, log: state.log, width, height: 170 });
  figure.append(chart);
  readable(figure, said, series, chart);
}

/** Let the pointer and the arrow keys read a curve's values. */
function readable(figure, said, series, chart) {
  const places = [...new Set(series.flat().map(([place]) => place))].sort(
    (one, other) => one - other,
  );
  const line = svg("line", { class: "cursor", visibility: "hidden" });
  chart.append(line);
  let at = places.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = chart.scaleX(places[at]);
    for (const [key, value] of Object.entries({
      x1: x,
      x2: x,
      y1: 10,
      y2: 146,
      visibility: "visible",
    })) {
      line.setAttribute(key, value);
    }
    said.textContent = readout(series, places[at]);
  };
  const hide = () => {
    line.setAttribute("visibility", "hidden");
    said.textContent = readout(series, null);
  };
  figure.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const distance = (place) => Math.abs(chart.scaleX(place) - x);
    show(
      places.reduce(
        (best, place, index) => (distance(place) < distance(places[best]) ? index : best),
        0,
      ),
    );
  });
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const stride = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!stride) return;
    event.preventDefault();
    show(at + stride * (event.shiftKey ? 10 : 1));
  });
}

function drawCurves() {
  element("curves").replaceChildren();
  namesOfCurves().forEach(curve);
}

// ---- everything else, drawn once ----

function sampleOf(run, { step, text }, isLast) {
  const who = runs.length > 1 ? `${run.name}, ` : "";
  const details = make("details", { open: isLast }, [
    make("summary", { textContent: `${who}step ${number(step)}` }),
    make("pre", { textContent: text }),
  ]);
  return details;
}

function drawSamples() {
  const all = runs.flatMap((run) =>
    run.samples.map((sample, index) => sampleOf(run, sample, index === run.samples.length - 1)),
  );
  element("samples-section").hidden = all.length === 0;
  element("samples").replaceChildren(...all);
}

function drawLegend() {
  if (runs.length === 1) return;
  const entries = runs.map((run, index) => {
    const line = svg("svg", { class: "chart", viewBox: "0 0 28 12", "aria-hidden": "true" });
    line.append(svg("path", { class: `series series-${index % 6}`, d: "M0 6L28 6" }));
    return make("li", {}, [line, run.name]);
  });
  element("legend").replaceChildren(...entries);
}

function start() {
  const names = runs.map((run) => run.name).join(", ");
  document.title = runs.length > 1 ? `Runs: ${names}` : `Run ${names}`;
  element("title").textContent = runs.length > 1 ? `${runs.length} runs` : runs[0].name;
  element("lead").textContent =
    runs.length > 1
      ? `${names}; rows that differ are highlighted.`
      : `This run: ${runs[0].status}.`;
  element("outcome").replaceChildren(outcome());
  element("advice").textContent =
    runs.length === 1 && runs[0].advice ? `The ${runs[0].advice}.` : "";
  element("receipt").replaceChildren(table(runs.map((run) => run.receipt)));
  const weights = runs.map((run) => run.summary.weights ?? {});
  element("weights").replaceChildren(table(weights, (sum) => (sum ?? "").slice(0, 12)));
  element("weights-section").hidden = weights.every((sums) => Object.keys(sums).length === 0);
  element("environment").replaceChildren(table(runs.map((run) => run.environment)));
  element("environment-section").hidden = runs.every(
    (run) => Object.keys(run.environment).length === 0,
  );
  element("commands").replaceChildren(
    table(
      runs.map((run) => run.commands),
      (text) => make("code", { textContent: text }),
    ),
  );
  drawSamples();
  drawLegend();
  drawCurves();
  element("axis").addEventListener("change", (event) => {
    state.axis = Number(event.target.value);
    drawCurves();
  });
  element("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    drawCurves();
  });
  window.addEventListener("resize", drawCurves);
}

start();
