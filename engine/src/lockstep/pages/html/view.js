// The view of one recorded step on a chosen number of ranks, as plain values.
// If that number of ranks wasn't recorded, it is simulated, and `note` reports it.

/** Return a function that draws numbers from 0 to 1, seeded by `seed` (mulberry32). */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** Return a function that samples the normal distribution (Box and Muller 1958). */
function normalNumbers(seed) {
  const uniform = randomNumbers(seed);
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

function mean(numbers) {
  return numbers.reduce((sum, each) => sum + each, 0) / numbers.length;
}

/** Standard deviation of one value over recorded ranks; for one rank, the gradient's RMS. */
function scatter(values, parameter) {
  if (values.length === 1) {
    return parameter.mean_norm / Math.sqrt(parameter.shape.reduce((size, side) => size * side, 1));
  }
  const middle = mean(values);
  const squares = values.map((value) => (value - middle) ** 2);
  return Math.sqrt(squares.reduce((sum, each) => sum + each, 0) / (values.length - 1));
}

/** Return how many ranks of `recording` have values here: the first few, at most 8. */
function keptRanks(recording) {
  return Math.min(recording.losses.length, 8);
}

/** Return the parameter for `ranks` ranks: before[rank][value], after[value], updated[value]. */
function simulatedParameter(parameter, ranks, random) {
  const before = parameter.before.slice(0, ranks).map((row) => [...row]);
  const columns = parameter.after.map((_, index) => parameter.before.map((row) => row[index]));
  while (before.length < ranks) {
    before.push(columns.map((values) => mean(values) + scatter(values, parameter) * random()));
  }
  const after = parameter.after.map((_, index) => mean(before.map((row) => row[index])));
  const moved = parameter.updated.map((value, index) => Math.abs(value - parameter.weights[index]));
  const rate = mean(moved) / (mean(parameter.after.map(Math.abs)) || 1);
  const updated = parameter.weights.map((weight, index) => weight - rate * after[index]);
  return { ...parameter, before, after, updated, norms: parameter.norms.slice(0, ranks) };
}

function simulationNote(recording, ranks) {
  const kept = keptRanks(recording);
  const known = Math.min(ranks, kept);
  const recorded = known === 1 ? "rank 0 was recorded" : `ranks 0 to ${known - 1} were recorded`;
  const drawn = ranks > kept ? ", the others are drawn at random around what was recorded" : "";
  return (
    `Simulation: this step ran on ${recording.ranks} rank${recording.ranks > 1 ? "s" : ""}, ` +
    `not on ${ranks}. Here ${recorded}${drawn}; this page computed average and update.`
  );
}

/** Return the view of `recording` on `ranks` ranks. */
function viewOf(recording, ranks) {
  const kept = keptRanks(recording);
  const isRecorded = ranks === kept;
  const random = normalNumbers(recording.step * 8 + ranks);
  const parameters = recording.parameters.map((parameter) =>
    isRecorded ? parameter : simulatedParameter(parameter, ranks, random),
  );
  return {
    recording,
    ranks,
    parameters,
    isRecorded,
    total: isRecorded ? recording.ranks : ranks,
    known: Math.min(ranks, kept),
    note: isRecorded ? "" : simulationNote(recording, ranks),
  };
}
