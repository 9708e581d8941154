// Numbers as people read them.
//
//   count(12345) "12,345"    short(12345) "12.3k"    duration(1530) "1.53 s"    ago(ms since) "3 min"
//   bytes(4096) "4 KiB"      percent(0.25) "25 %"    clock(ms since 1970) "14:03:21.120"

// Classes of badges for states of requests.
export const BADGES = {
  finished: "ok",
  failed: "bad",
  unreadable: "bad",
  cancelled: "warn",
  preempted: "warn",
  running: "info",
};

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });

export const count = number => NUMBER.format(number);

export function short(number) {
  const [unit, name] = number >= 1e9 ? [1e9, "G"] : number >= 1e6 ? [1e6, "M"] : number >= 1e4 ? [1e3, "k"] : [1, ""];
  return digits(number / unit) + name;
}

export function duration(ms) {
  if (ms < 0) return `-${duration(-ms)}`;
  if (!ms) return "0 ms";
  if (ms < 1) return `${digits(ms * 1000)} µs`;
  if (ms < 1000) return `${digits(ms)} ms`;
  if (ms < 60_000) return `${digits(ms / 1000)} s`;
  return ago(ms);
}

export function ago(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s % 60 && s < 600 ? ` ${s % 60} s` : ""}`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit++;
  }
  return `${digits(number)} ${units[unit]}`;
}

// What is not known is a dash.
export const known = (value, says) => (value === null || value === undefined ? "-" : says(value));

export const percent = share => `${digits(share * 100)} %`;

export function clock(ms) {
  const time = new Date(ms),
    two = number => String(number).padStart(2, "0");
  const parts = [time.getHours(), time.getMinutes(), time.getSeconds()].map(two);
  return `${parts.join(":")}.${String(time.getMilliseconds()).padStart(3, "0")}`;
}

function digits(number) {
  // three digits that say something, and no zeros after them
  return NUMBER.format(Number(number.toPrecision(3)));
}
