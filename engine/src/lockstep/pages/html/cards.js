// The cards, one per rank: their content, and how numbers move from stage to stage.

function make(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function format(value) {
  if (value === null) return "not finite";
  const sign = value < 0 ? "−" : "+";
  return sign + Math.abs(value).toExponential(4).replace("e-", "e−");
}

/** Return the flat index `position` as an index into `shape`, like "[2, 3]". */
function placeOf(position, shape) {
  const place = [];
  for (const side of [...shape].reverse()) {
    place.unshift(position % side);
    position = Math.floor(position / side);
  }
  return `[${place.join(", ")}]`;
}

/** Return rank `rank`'s values of `parameter` at the current stage; nulls before backward. */
function valuesOf(parameter, rank) {
  if (state.stage === SAMPLES) return parameter.after.map(() => null);
  if (state.stage === GRADIENTS) return parameter.before[rank];
  return state.stage === AVERAGE ? parameter.after : parameter.updated;
}

/** Return `text` with visible signs for line breaks: a card has room for two lines. */
function oneLine(text) {
  return text.replace(/\s*\n\s*/g, " ↵ ").replace(/[ \t]+/g, " ");
}

function samplesOf(rank) {
  const known = rank < view.known;
  const texts = known ? view.recording.samples[rank] : ["simulated: this rank has no samples"];
  return texts.map((text) =>
    make("p", { className: "sample", textContent: oneLine(text), title: text }),
  );
}

function valueRow(parameter, index, rank) {
  const bar = make("i");
  const value = make("td", { className: "value" });
  const place = placeOf(parameter.positions[index], parameter.shape);
  const row = make("tr", {}, [
    make("th", { scope: "row", textContent: place }),
    make("td", { className: "bar", ariaHidden: "true" }, [bar]),
    value,
  ]);
  Object.assign(row.dataset, { rank, index });
  return row;
}

function cardOf(rank) {
  const parameter = view.parameters[state.parameter];
  const known = rank < view.known;
  const loss =
    known && view.recording.losses[rank] !== null ? view.recording.losses[rank].toFixed(3) : "";
  const title = make("h3", { id: `rank-${rank}` }, [
    `Rank ${rank}`,
    make("small", { textContent: known ? `loss ${loss}` : "simulated" }),
  ]);
  const strip = make("canvas", { role: "img", className: "strip" });
  strip.setAttribute("aria-label", `All recorded values of rank ${rank}, as colors`);
  const rows = parameter.after.map((_, index) => valueRow(parameter, index, rank));
  const caption = make("caption", { className: "hidden", textContent: parameter.name });
  const table = make("table", {}, [caption, make("tbody", {}, rows)]);
  const norm = make("div", { className: "norm" }, [make("span"), make("span")]);
  const card = make("article", { className: "card" }, [
    title,
    ...samplesOf(rank),
    strip,
    table,
    norm,
  ]);
  card.classList.toggle("simulated", !known);
  card.setAttribute("aria-labelledby", `rank-${rank}`);
  return card;
}

/** Return the current gradient norm of rank `rank` over all parameters; null if unknown. */
function normOf(rank) {
  const length = (norms) => Math.sqrt(norms.reduce((sum, norm) => sum + norm ** 2, 0));
  if (state.stage === GRADIENTS && rank < view.known) {
    return length(view.parameters.map((parameter) => parameter.norms[rank]));
  }
  const isKnown = state.stage === AVERAGE && view.isRecorded;
  return isKnown ? length(view.parameters.map((parameter) => parameter.mean_norm)) : null;
}

function fillNorm(card, rank) {
  const norm = normOf(rank);
  const [label, number] = card.querySelector(".norm").children;
  label.textContent = norm === null ? "" : "norm of the whole gradient";
  number.textContent = norm === null ? "" : norm.toPrecision(5);
}

// ---- numbers and bars, and how they move between stages ----

function drawValue(row, value, largest) {
  const cell = row.querySelector(".value");
  cell.textContent = value === null && state.stage === SAMPLES ? "–" : format(value);
  const bar = row.querySelector("i");
  bar.classList.toggle("minus", value < 0);
  bar.style.setProperty("--size", `${value === null ? 0 : (Math.abs(value) / largest) * 50}%`);
}

/** Return the value of a full bar: the largest for this index; for weights, the largest of all. */
function largestOf(parameter, index) {
  const column = [...parameter.before.map((row) => row[index]), parameter.after[index]];
  const all = state.stage === UPDATE ? parameter.updated : column;
  return Math.max(...all.map((value) => Math.abs(value ?? 0))) || 1;
}

/** Draw every number on its way from `from` to its value here, which it reaches at `share` = 1. */
function drawNumbers(from, share) {
  const parameter = view.parameters[state.parameter];
  for (const row of element("ranks").querySelectorAll("tr")) {
    const target = valuesOf(parameter, Number(row.dataset.rank))[row.dataset.index];
    const start = from.get(`${row.dataset.rank} ${row.dataset.index}`);
    const moves = share < 1 && target !== null && start !== undefined && start !== null;
    drawValue(
      row,
      moves ? start + (target - start) * share : target,
      largestOf(parameter, row.dataset.index),
    );
    row.dataset.value = target ?? "";
  }
}

function moveNumbers(from) {
  const started = performance.now();
  const [stage, shown] = [state.stage, view];
  const frame = (now) => {
    if (state.stage !== stage || view !== shown) return;
    const share = Math.min(1, (now - started) / 600);
    drawNumbers(from, 1 - (1 - share) ** 3);
    if (share < 1) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

/** Return the numbers now on the page: "rank index" -> value. */
function shownNumbers() {
  const rows = [...element("ranks").querySelectorAll("tr")].filter((row) => row.dataset.value);
  return new Map(
    rows.map((row) => [`${row.dataset.rank} ${row.dataset.index}`, Number(row.dataset.value)]),
  );
}

/** Return a parameter's strip, from -1 to 1: gradients, or at the update the weights' change. */
function shadesOf(parameter, rank) {
  const change = parameter.updated.map((value, index) => value - parameter.weights[index]);
  const values = state.stage === UPDATE ? change : valuesOf(parameter, rank);
  const all = state.stage === UPDATE ? change : parameter.before.flat();
  const largest = Math.max(...all.map((value) => Math.abs(value ?? 0))) || 1;
  return values.map((value) => (value ?? 0) / largest);
}

function drawStrip(canvas, rank) {
  const style = getComputedStyle(document.documentElement);
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const pen = canvas.getContext("2d");
  pen.fillStyle = style.getPropertyValue("--none");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  const cells = view.parameters.flatMap((parameter) => shadesOf(parameter, rank));
  const width = canvas.width / cells.length;
  cells.forEach((cell, index) => {
    pen.globalAlpha = Math.sqrt(Math.min(1, Math.abs(cell)));
    pen.fillStyle = style.getPropertyValue(cell < 0 ? "--minus" : "--plus");
    pen.fillRect(index * width, 0, Math.max(1, width), canvas.height);
  });
}
