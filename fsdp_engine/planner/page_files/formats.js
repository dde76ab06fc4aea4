// Numbers as text, as `terminal.py` and `questions.py` print them.

const plan = JSON.parse(document.getElementById("numbers").textContent);
const byId = (id) => document.getElementById(id);

// Fixed decimals, with commas between thousands. toFixed rounds the number itself, as Python does;
// toLocaleString alone would round its shortest decimal form.
const fixed = (number, digits) => Number(number.toFixed(digits)).toLocaleString(
  "en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const inUnits = (bytes) => fixed(bytes / plan.unit.bytes, plan.unit.digits);
const milliseconds = (seconds) => `${fixed(1e3 * seconds, 1)} ms`;
const percent = (fraction) => `${fixed(100 * fraction, 1)}%`;

const formatCount = (count) => {
  let scaled = count;
  const unit = plan.countUnits.find((each, index) => {
    if (Math.abs(scaled) < 999.5 || index === plan.countUnits.length - 1) return true;
    scaled /= 1000;
    return false;
  });
  if (Math.abs(scaled) >= 999.5) return fixed(scaled, 0) + unit;
  return Number(scaled.toPrecision(3)) + unit;
};

const formatBytes = (bytes) => {
  let scaled = bytes;
  const unit = plan.byteUnits.find((each, index) => {
    if (scaled < 1024 || index === plan.byteUnits.length - 1) return true;
    scaled /= 1024;
    return false;
  });
  return `${fixed(scaled, unit === plan.byteUnits[0] ? 0 : 1)} ${unit}`;
};

const formatDuration = (seconds) => {
  const long = plan.durations.find((each) => seconds >= 2 * each.seconds);
  if (long !== undefined) return `${fixed(seconds / long.seconds, 1)} ${long.name}`;
  return seconds >= 1 ? `${fixed(seconds, 2)} s` : milliseconds(seconds);
};
