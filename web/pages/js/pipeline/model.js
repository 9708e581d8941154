// The pipeline as data: a fold of the pictures that GET /v1/pipeline/events sends. It remembers what a picture cannot say:
// what changed, who went away, and figures over the last minutes. Knows no page, no clock and no network.

export const SERIES_MS = 5 * 60_000; // figures are kept so long
export const FADING_MS = 12_000; // what went away, and a takeover, are shown so long
const UNNAMED_MS = 2_000; // so long a takeover is not told, if its process has not yet said who it is
const MOST_HAPPENINGS = 200;
const ORDER = ["web", "tokenize", "generate", "rank", "detokenize", "archive", "janitor"];
const FIGURES = ["output_tokens_per_s", "prompt_tokens_per_s", "running", "waiting", "cache_used", "prefix_hits"];

export class Pipeline {
  constructor() {
    this.picture = null; // the last one
    this.error = ""; // why there is no newer one; "": there is
    // name -> {...slot, goneMs, tookMs, tookEpoch, heldBy, isTold}; those that went away stay for a while. heldBy: the last
    // process that had the slot; isTold: its last takeover is told.
    this.slots = new Map();
    this.series = new Map(); // engine -> {times, <figure>: values}
    this.happenings = []; // {ms, slot, says, kind}, the newest first
    this._dead = null;
  }

  hear(picture) {
    this.error = picture.error ?? "";
    if (!picture.slots) return; // nothing was read yet
    if (!this.error || !this.picture) {
      const isFirst = this.picture === null;
      this._takeSlots(picture, isFirst);
      this._takeFigures(picture);
      if (this._dead !== null && picture.num_dead > this._dead)
        this._happens(picture.at_ms, "", "a request became a dead letter", "bad");
      this._dead = picture.num_dead;
    }
    this.picture = picture;
  }

  // The slots of a stage, by their number; ranks are those of an engine group and have a stage of their own.
  stage(name) {
    return [...this.slots.values()].filter(slot => stageOf(slot.slot) === name);
  }

  _takeSlots(picture, isFirst) {
    const seen = new Set();
    for (const slot of picture.slots) {
      seen.add(slot.slot);
      const before = this.slots.get(slot.slot);
      const now = {
        ...slot,
        goneMs: 0,
        tookMs: before?.tookMs ?? 0,
        tookEpoch: before?.tookEpoch ?? 0,
        heldBy: before?.heldBy ?? 0,
        isTold: before?.isTold ?? true,
      };
      if (slot.phase === "away") now.goneMs = before?.goneMs || picture.at_ms;
      if (!isFirst) this._tellChange(picture.at_ms, before, now);
      if (slot.pid && slot.lease_ms) now.heldBy = slot.pid; // a process without a lease only waits for the slot
      this.slots.set(slot.slot, now);
    }
    for (const [name, slot] of this.slots) {
      if (seen.has(name)) continue;
      if (!slot.goneMs) {
        this._happens(picture.at_ms, name, "is gone", "warn");
        this.slots.set(name, { ...slot, phase: "gone", lease_ms: 0, goneMs: picture.at_ms });
      } else if (slot.phase === "gone" && picture.at_ms - slot.goneMs > FADING_MS) {
        this.slots.delete(name);
      }
    }
    this.slots = new Map([...this.slots].sort(([one], [other]) => compareSlots(one, other)));
  }

  _tellChange(ms, before, now) {
    if (!before) {
      this._happens(ms, now.slot, `appeared: ${now.phase}`, "info");
      return;
    }
    if (now.epoch > before.epoch && before.epoch > 0)
      Object.assign(now, { tookMs: ms, tookEpoch: now.epoch, isTold: false });
    if (!now.isTold && (now.pid || ms - now.tookMs >= UNNAMED_MS)) {
      const who =
        now.pid && now.heldBy && now.pid !== now.heldBy ? ` by process ${now.pid}, before it was ${now.heldBy}` : "";
      now.isTold = true;
      this._happens(ms, now.slot, `epoch ${now.epoch}, taken over${who}`, "warn");
    }
    if (now.phase !== before.phase) {
      const kind = now.phase === "away" ? "bad" : now.phase === "ready" || now.phase === "held" ? "ok" : "info";
      this._happens(ms, now.slot, now.phase === "away" ? "no worker" : phaseOf(now), kind);
    }
  }

  _happens(ms, slot, says, kind) {
    this.happenings.unshift({ ms, slot, says, kind });
    this.happenings.length = Math.min(this.happenings.length, MOST_HAPPENINGS);
  }

  _takeFigures(picture) {
    for (const engine of picture.engines) {
      if (!this.series.has(engine.engine)) {
        this.series.set(engine.engine, { times: [], ...Object.fromEntries(FIGURES.map(name => [name, []])) });
      }
      const series = this.series.get(engine.engine);
      series.times.push(picture.at_ms);
      for (const name of FIGURES) series[name].push(engine[name]);
      const late = series.times.findIndex(ms => ms >= picture.at_ms - SERIES_MS);
      if (late > 60) {
        // in larger pieces, so that arrays do not move with each picture
        for (const values of Object.values(series)) values.splice(0, late);
      }
    }
    for (const [name, series] of this.series)
      if (series.times.at(-1) < picture.at_ms - SERIES_MS) this.series.delete(name);
  }
}

// Return the stage in the name of a slot; "rank" for all ranks but 0.
function stageOf(slot) {
  const name = slot.slice(0, slot.lastIndexOf("-"));
  return name.startsWith("rank-") ? "rank" : name;
}

export function numberOf(slot) {
  return Number(slot.slice(slot.lastIndexOf("-") + 1));
}

// Return what a worker does, in words.
export function phaseOf(slot) {
  if (slot.phase === "loading" && slot.progress) return `loading ${Math.round(slot.progress * 100)} %`;
  if (slot.phase === "waiting" && slot.detail) return `waiting for ${slot.detail}`;
  return slot.phase === "held" ? "active" : slot.phase;
}

function compareSlots(one, other) {
  const [first, second] = [ORDER.indexOf(stageOf(one)), ORDER.indexOf(stageOf(other))];
  return (
    first - second ||
    one.slice(0, one.lastIndexOf("-")).localeCompare(other.slice(0, other.lastIndexOf("-"))) ||
    numberOf(one) - numberOf(other)
  );
}

// Requests by uid, the newest first, from pages of GET /v1/requests and from pictures.
export class Requests {
  constructor() {
    this.rows = []; // all, the newest first
    this._byUid = new Map();
  }

  get size() {
    return this.rows.length;
  }

  // Take in rows of a page or of a picture; return whether something changed.
  take(rows, atMs = 0) {
    let isNew = false;
    for (const given of rows) {
      const row = given.submitted_ms || !atMs ? given : { ...given, submitted_ms: atMs - given.age_ms };
      const known = this._byUid.get(row.uid);
      if (known) {
        Object.assign(known, row, { text: "" });
      } else {
        const made = { ...row, text: "" };
        this._byUid.set(row.uid, made);
        this.rows.push(made);
        isNew = true;
      }
    }
    if (isNew) this.rows.sort((one, other) => (one.uid < other.uid ? 1 : one.uid > other.uid ? -1 : 0));
    return rows.length > 0;
  }

  // The rows of some states (a Set; null: all) that have *words* in what they show.
  matching(states, words) {
    const wanted = words.trim().toLowerCase();
    if (!states && !wanted) return this.rows;
    return this.rows.filter(row => (!states || states.has(row.state)) && (!wanted || textOf(row).includes(wanted)));
  }
}

function textOf(row) {
  row.text ||= [
    row.uid,
    row.model,
    row.endpoint,
    row.reason,
    row.engine,
    row.owner,
    row.state,
    ...Object.values(row.labels ?? {}),
  ]
    .map(each => (typeof each === "string" ? each : JSON.stringify(each ?? "")))
    .join("\n")
    .toLowerCase();
  return row.text;
}
