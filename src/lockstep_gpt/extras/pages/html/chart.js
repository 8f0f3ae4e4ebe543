// Lines over the steps of a run, as SVG.

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

/** Format a number of steps or tokens for an axis. */
function shortCount(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** Return the function from values to pixels; `log` makes the axis logarithmic. */
function scaleOf(low, high, from, to, log) {
  const place = log ? Math.log : (value) => value;
  const width = place(high) - place(low) || 1;
  return (value) => from + ((place(value) - place(low)) / width) * (to - from);
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
 * Draw lines over steps.
 *
 * series: lists of [step, value or null]; limit: {value, label} of a dashed line;
 * here: a step to mark; label: a description of the picture for screen readers.
 */
function lineChart({
  series,
  label,
  log = false,
  limit = null,
  here = null,
  width = 560,
  height = 190,
}) {
  const [left, right, top, bottom] = [52, 10, 18, 24];
  const points = series.flat().filter(([, value]) => value !== null);
  const values = [...points.map(([, value]) => value), ...(limit ? [limit.value] : [])];
  const steps = points.map(([step]) => step);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = scaleOf(Math.min(...steps), Math.max(...steps), left, width - right, false);
  const y = scaleOf(low, high, height - bottom, top, log);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.setAttribute("aria-label", label);
  for (const value of log ? logTicks(low, high) : ticks(low, high, 4)) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    );
    picture.append(
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, shortNumber(value)),
    );
  }
  for (const step of ticks(Math.min(...steps), Math.max(...steps), width / 110)) {
    picture.append(
      svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, shortCount(step)),
    );
  }
  if (limit) {
    const at = y(limit.value);
    picture.append(svg("line", { class: "limit", x1: left, x2: width - right, y1: at, y2: at }));
    picture.append(svg("text", { x: width - right, y: at - 5, "text-anchor": "end" }, limit.label));
  }
  series.forEach((each, index) => {
    picture.append(svg("path", { class: `series series-${index % 6}`, d: pathOf(each, x, y) }));
  });
  const marked = series[0].find(([step, value]) => step === here && value !== null);
  if (marked) picture.append(svg("circle", { class: "here", cx: x(here), cy: y(marked[1]), r: 5 }));
  picture.scaleX = x;
  return picture;
}
