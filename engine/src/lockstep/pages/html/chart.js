// A line over the steps of a run on a logarithmic axis, as SVG.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

/** Return about `count` round numbers between `low` and `high`. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / unit) * unit; value <= high * (1 + 1e-9); value += unit) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

/** Return 1, 2, and 5 times each power of ten for a logarithmic axis; if over 6, the powers. */
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    found.push(...[1, 2, 5].map((each) => Number((each * 10 ** power).toPrecision(12))));
  }
  const within = found.filter((value) => value >= low && value <= high);
  const powers = within.filter((value) =>
    Number.isInteger(Math.round(Math.log10(value) * 1e9) / 1e9),
  );
  return within.length > 6 ? powers : within;
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

/** Return the function from values to pixels. */
function scaleOf(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

/** Return an SVG path of `M` and `L` commands, with a gap at each missing value. */
function pathOf(points, x, y) {
  let pen = "M";
  return points
    .map(([step, value]) => {
      if (value === null) {
        pen = "M";
        return "";
      }
      const part = `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}

/**
 * Draw a line over steps.
 *
 * points: a list of [step, value or null]; limit: {value, label} of a dashed line;
 * here: a step to mark; label: a description of the picture for screen readers.
 */
function lineChart({ points, label, limit, here, width }) {
  const [left, right, top, bottom, height] = [52, 10, 18, 24, 190];
  const known = points.filter(([, value]) => value !== null);
  const values = [...known.map(([, value]) => value), limit.value];
  const steps = known.map(([step]) => step);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = scaleOf(Math.min(...steps), Math.max(...steps), left, width - right);
  const linear = scaleOf(Math.log(low), Math.log(high), height - bottom, top);
  const y = (value) => linear(Math.log(value));
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" });
  const add = (...words) => picture.append(svg(...words));
  picture.setAttribute("aria-label", label);
  for (const value of logTicks(low, high)) {
    add("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) });
    add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, shortNumber(value));
  }
  for (const step of ticks(Math.min(...steps), Math.max(...steps), width / 110)) {
    add("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, step.toLocaleString("en"));
  }
  const at = y(limit.value);
  add("line", { class: "limit", x1: left, x2: width - right, y1: at, y2: at });
  add("text", { x: width - right, y: at - 5, "text-anchor": "end" }, limit.label);
  add("path", { class: "series", d: pathOf(points, x, y) });
  const marked = known.find(([step]) => step === here);
  if (marked) add("circle", { class: "here", cx: x(here), cy: y(marked[1]), r: 5 });
  return picture;
}
