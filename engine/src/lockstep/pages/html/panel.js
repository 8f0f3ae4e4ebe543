// The page: its state, what it shows, and the buttons and keys that change it.

const run = JSON.parse(document.getElementById("data").textContent);
const [SAMPLES, GRADIENTS, AVERAGE, UPDATE] = [0, 1, 2, 3];
const ACTIONS = ["Compute gradients", "All-reduce", "Update the weights", "Next recorded step"];
// ranks: the number chosen; null: the number recorded
const state = { index: 0, ranks: null, parameter: 0, stage: SAMPLES };
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const element = (id) => document.getElementById(id);
let view = null;

// ---- text ----

function statusText() {
  const parameter = view.parameters[state.parameter];
  const count = view.parameters.reduce((sum, each) => sum + each.after.length, 0);
  const ranks = view.total === 1 ? "The only rank has" : `Each of ${view.total} ranks has`;
  return [
    `${ranks} read its own samples. There is no gradient yet.`,
    view.total === 1
      ? "One rank: its gradient is already the average."
      : `Each rank has its own gradient. Shown: ${parameter.after.length} values of ` +
        `${parameter.name}; colored: ${count} values of all parameters.`,
    view.total === 1
      ? "Nothing to exchange: the average of one gradient is that gradient."
      : `The gradients were added up over ${view.total} ranks and divided by ${view.total}: ` +
        "now every rank has the same numbers.",
    "The same gradient on the same weights gives the same new weights on every rank: " +
      "they stay in step.",
  ][state.stage];
}

function arithmeticText() {
  const parameter = view.parameters[state.parameter];
  const place = `${parameter.name}${placeOf(parameter.positions[0], parameter.shape)}`;
  const [weight, updated] = [parameter.weights[0], parameter.updated[0]];
  if (state.stage < AVERAGE) return "";
  if (state.stage === UPDATE)
    return `${place}: ${format(weight)} → ${format(updated)} on every rank`;
  const terms = parameter.before.map((row) => format(row[0])).join("  ");
  const more = view.total > view.ranks ? `  … ${view.total - view.ranks} more` : "";
  return `${place}: (${terms}${more}) / ${view.total} = ${format(parameter.after[0])}`;
}

/** Return the result of the ranks' comparison while recording, as text. */
function checkText() {
  const compared = run.recordings.filter((each) => each.ranks > 1);
  if (compared.length === 0) return "";
  const worst = Math.max(...compared.map((each) => each.spread ?? Infinity));
  return worst === 0
    ? "Checked on all ranks while recording: averages and new weights were the same to the bit."
    : `While recording, averages or new weights differed between ranks by up to ${worst}: ` +
        "something is wrong with this run.";
}

function drawFacts() {
  const { micro_size: micro, accumulation, tokens_per_sample: tokens, step } = view.recording;
  const samples = micro * accumulation * view.total;
  const parts = [`${micro} samples`, `${view.total} rank${view.total > 1 ? "s" : ""}`];
  if (accumulation > 1) parts.push(`${accumulation} micro-batches`);
  element("coverage").replaceChildren(
    `${parts.join(" × ")} = `,
    make("b", { textContent: samples }),
    " samples",
  );
  const unit = tokens ? "tokens" : "samples";
  const inStep = samples * (tokens || 1);
  element("coverage-more").textContent =
    `${inStep.toLocaleString("en")} ${unit} in this step, ` +
    `about ${(inStep * step).toLocaleString("en")} since the first.`;
  element("advice").textContent = `${run.recordings.at(-1).advice}.`;
}

function drawNoise() {
  const points = run.recordings.map((each) => [each.step, each.noise_scale]);
  if (points.filter(([, value]) => value !== null).length < 2)
    return element("noise").replaceChildren();
  const { micro_size: micro, accumulation, ranks, step, noise_scale: now } = view.recording;
  const batch = micro * accumulation * ranks;
  const limit = { value: batch, label: `a step has ${batch}` };
  const said = (value) => (value === null ? "unknown" : shortNumber(value));
  const values = points.map(([at, value]) => `step ${at}: ${said(value)}`);
  const label = `Gradient noise scale in samples over the steps: ${values.join(", ")}`;
  const caption = make("figcaption", {
    className: "quiet",
    textContent: `Noise scale in samples over the steps; at step ${step}: ${said(now)}`,
  });
  element("noise").replaceChildren(
    lineChart({ points, label, limit, here: step, width: element("noise").clientWidth }),
    caption,
  );
}

// ---- drawing the page ----

function drawStages() {
  [...element("stages").querySelectorAll("button")].forEach((button, index) => {
    button.classList.toggle("done", index <= state.stage);
    if (index === state.stage) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  const last = state.stage === UPDATE && state.index === run.recordings.length - 1;
  element("next").textContent = last ? "Start this step again" : ACTIONS[state.stage];
  element("status").textContent = statusText();
  element("arithmetic").textContent = arithmeticText();
}

/** Draw the stage; at the average, numbers move there from their values in `from`. */
function drawStage(from = new Map()) {
  drawStages();
  for (const [rank, card] of [...element("ranks").children].entries()) {
    card.classList.toggle("same", state.stage >= AVERAGE);
    fillNorm(card, rank);
    drawStrip(card.querySelector("canvas"), rank);
  }
  const moves = from.size > 0 && state.stage === AVERAGE && !calm.matches;
  drawNumbers(from, moves ? 0 : 1);
  if (moves) moveNumbers(from);
}

function draw() {
  const recording = run.recordings[state.index];
  view = viewOf(recording, state.ranks ?? keptRanks(recording));
  element("lead").textContent =
    `${run.name}, a step on ${recording.ranks} rank${recording.ranks > 1 ? "s" : ""}: each computes ` +
    "a gradient from its own samples, and after averaging, all have the same one.";
  element("step").value = state.index;
  element("step-name").textContent =
    `step ${recording.step} (${state.index + 1} of ${run.recordings.length})`;
  element("earlier").disabled = state.index === 0;
  element("later").disabled = state.index === run.recordings.length - 1;
  for (const input of element("rank-choice").querySelectorAll("input")) {
    const recorded = Number(input.value) === keptRanks(recording);
    input.checked = Number(input.value) === view.ranks;
    input.parentElement.classList.toggle("recorded", recorded);
    input.parentElement.title = recorded ? "recorded" : "simulated";
    input.setAttribute("aria-label", `${input.value} ranks, ${input.parentElement.title}`);
  }
  element("parameter").selectedIndex = state.parameter;
  element("simulation").textContent = view.note;
  element("simulation").hidden = view.isRecorded;
  element("ranks").replaceChildren(
    ...Array.from({ length: view.ranks }, (_, rank) => cardOf(rank)),
  );
  drawFacts();
  drawNoise();
  drawStage();
}

function goTo(stage) {
  const from = shownNumbers();
  state.stage = Math.max(SAMPLES, Math.min(UPDATE, stage));
  drawStage(from);
}

function walk(steps) {
  const index = Math.max(0, Math.min(run.recordings.length - 1, state.index + steps));
  const stays = Math.min(state.parameter, run.recordings[index].parameters.length - 1);
  Object.assign(state, { index, stage: SAMPLES, parameter: stays });
  draw();
}

function next() {
  if (state.stage < UPDATE) goTo(state.stage + 1);
  else walk(state.index === run.recordings.length - 1 ? 0 : 1);
}

function choose(changes) {
  Object.assign(state, changes);
  draw();
}

function chooseRanks(ranks) {
  choose({ ranks: ranks === keptRanks(view.recording) ? null : ranks });
}

const KEYS = {
  ArrowRight: next,
  ArrowLeft: () => goTo(state.stage - 1),
  ".": () => walk(1),
  ",": () => walk(-1),
  p: () => choose({ parameter: (state.parameter + 1) % view.parameters.length }),
  r: () => goTo(SAMPLES),
};

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input, select");
  if (typing && (event.key.startsWith("Arrow") || typing.tagName === "SELECT")) return;
  const act = /^[1-8]$/.test(event.key) ? () => chooseRanks(Number(event.key)) : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function rankButton(ranks) {
  const input = make("input", { type: "radio", name: "ranks", value: ranks });
  input.addEventListener("change", () => chooseRanks(ranks));
  return make("label", {}, [input, String(ranks)]);
}

function start() {
  element("check").textContent = checkText();
  element("rank-choice").append(...Array.from({ length: 8 }, (_, index) => rankButton(index + 1)));
  const names = run.recordings[0].parameters.map((each) =>
    make("option", { textContent: each.name }),
  );
  element("parameter").append(...names);
  element("step").max = run.recordings.length - 1;
  element("step").addEventListener("input", (event) =>
    choose({ index: Number(event.target.value), stage: SAMPLES }),
  );
  element("parameter").addEventListener("change", (event) =>
    choose({ parameter: event.target.selectedIndex }),
  );
  element("earlier").addEventListener("click", () => walk(-1));
  element("later").addEventListener("click", () => walk(1));
  element("next").addEventListener("click", next);
  [...element("stages").querySelectorAll("button")].forEach((button, index) => {
    button.addEventListener("click", () => goTo(index));
  });
  document.addEventListener("keydown", pressed);
  window.addEventListener("resize", () => [drawStage, drawNoise].forEach((redraw) => redraw()));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawStage());
  draw();
}

start();
