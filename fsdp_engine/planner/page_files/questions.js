// The formulas of `questions.py`, which explains them; tests compare both. Times are in seconds.

const trainingRun = (row, items, price) => {
  const steps = Math.ceil(items / row.items);
  const seconds = steps * row.step;
  const gpuHours = seconds * plan.numRanks / plan.hour;
  return {
    steps,
    seconds,
    gpuHours,
    mfu: row.mfu,
    modelFlops: steps * row.modelFlops * plan.numRanks,
    cost: price === null ? null : price * gpuHours,
  };
};

const youngInterval = (save, mtbf) => Math.sqrt(2 * save * mtbf);

const dalyInterval = (save, mtbf) => {
  if (save >= 2 * mtbf) return mtbf;
  const ratio = save / (2 * mtbf);
  return youngInterval(save, mtbf) * (1 + Math.sqrt(ratio) / 3 + ratio / 9) - save;
};

const slowdown = (interval, save, restart, mtbf) =>
  mtbf * (Math.exp(restart / mtbf) * Math.expm1((interval + save) / mtbf)) / interval;

const checkpointInterval = (row, bandwidth, mtbfHours, count, restartSeconds) => {
  const save = row.checkpointBytes / bandwidth;
  const restart = restartSeconds === null ? save : restartSeconds;
  const mtbf = mtbfHours * plan.hour / count;
  const interval = dalyInterval(save, mtbf);
  return {
    save,
    mtbf,
    interval,
    young: youngInterval(save, mtbf),
    steps: Math.max(1, Math.round(interval / row.step)),
    overhead: 1 - 1 / slowdown(interval, save, restart, mtbf),
  };
};
