// /pipeline: the whole pipeline, live. One stream of pictures feeds everything here; it is closed while the tab is hidden.

import { explain, follow } from "../api.js";
import { el, everyFrame, fill, find, say } from "../dom.js";
import { clock } from "../format.js";
import { frame } from "../frame.js";
import { DeadLetters } from "./dead.js";
import { RequestList } from "./list.js";
import { Pipeline } from "./model.js";
import { aboutOf, Picture } from "./picture.js";
import { SeriesChart } from "./series.js";
import { UsageToday } from "./usage.js";

const HAPPENINGS_SHOWN = 40;

class PipelinePage {
  constructor(main) {
    this._pipeline = new Pipeline();
    this._trouble = ""; // why no picture comes
    this._looking = null;
    this._told = 0;
    this._picture = new Picture();
    this._series = new SeriesChart();
    this._list = new RequestList();
    this._dead = new DeadLetters();
    this._usage = new UsageToday();
    this._about = el("p.dim.number");
    this._notice = el("p.notice.warn", { role: "status", hidden: true });
    this._log = el("div.log.small", { role: "log", tabindex: "0", aria: { label: "What happened" } });
    this._content = el(
      "div.stack.content",
      this._picture.node,
      this._dead.node,
      el("div.beside", this._series.node, el("section.card.stack", el("h2", "What happened"), this._log)),
      this._usage.node,
      this._list.node,
    );
    fill(main, el("div.row", el("h1", "Pipeline"), el("span.grow"), this._about), this._notice, this._content);
    this._draw = everyFrame(() => this._drawNow());
    this._tell("Reading the pipeline.");
    document.addEventListener("visibilitychange", () => this._look());
  }

  start() {
    this._look();
    this._list.begin();
  }

  _look() {
    if (document.hidden) {
      this._looking?.abort();
      this._looking = null;
    } else if (!this._looking) {
      this._looking = new AbortController();
      this._read(this._looking.signal);
    }
  }

  async _read(signal) {
    const onState = (state, sentence) => {
      if (state === "waiting") this._tell(`${sentence} Trying again.`);
    };
    try {
      for await (const { data } of follow("/v1/pipeline/events", { signal, again: "always", onState })) {
        const wasAway = this._trouble !== "" && this._pipeline.picture !== null;
        this._pipeline.hear(JSON.parse(data));
        this._tell("");
        if (wasAway) this._list.begin();
        this._draw();
      }
    } catch (error) {
      this._tell(explain(error));
    }
  }

  _tell(sentence) {
    this._trouble = sentence;
    this._draw();
  }

  _drawNow() {
    const { picture, error } = this._pipeline;
    const since = picture ? ` This is how it was at ${clock(picture.at_ms).slice(0, 8)}.` : "";
    const says = this._trouble ? `${this._trouble}${since}` : error ? `The log cannot be read: ${error}.${since}` : "";
    this._notice.hidden = !says;
    this._notice.classList.toggle("warn", picture !== null || Boolean(error));
    say(this._notice, says);
    this._content.classList.toggle("stale", Boolean(says));
    this._content.hidden = !picture;
    if (!picture) return;
    fill(this._about, aboutOf(picture).join("; "));
    this._picture.show(this._pipeline);
    this._series.show(this._pipeline);
    this._dead.show(picture);
    this._usage.show();
    this._list.show(picture);
    this._showHappenings();
  }

  _showHappenings() {
    const { happenings } = this._pipeline;
    const newest = happenings[0] ?? null;
    if (newest === this._newest) return;
    const before = happenings.indexOf(this._newest);
    const fresh = happenings.slice(0, before < 0 ? HAPPENINGS_SHOWN : before);
    this._newest = newest;
    this._log.prepend(
      ...fresh.map(({ ms, slot, says, kind }) =>
        el(
          "p",
          { class: kind },
          el("span.dim.number", clock(ms).slice(0, 8)),
          " ",
          slot && el("span.mono", `${slot}: `),
          says,
        ),
      ),
    );
    while (this._log.children.length > HAPPENINGS_SHOWN) this._log.lastChild.remove();
  }
}

frame("Pipeline", () => location.reload());
new PipelinePage(find("#main")).start();
