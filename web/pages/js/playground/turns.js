// What a message looks like. A view shows one message and updates in place. It asks *acts* for all that has an effect:
//   isBusy()  isRunning(message)  isLast(message)  edit(message, text)  regenerate(message)  choose(message, at)
//   answerCall(message, results)  showRequest(message)

import { pageOf } from "../api.js";
import { button, copy, el, fill, say, tool } from "../dom.js";
import { count, duration } from "../format.js";
import { codeBlock, markdown } from "../markdown.js";
import { rate } from "./answer.js";
import { tokenView } from "./tokens.js";

export function messageView(message, acts) {
  if (message.role === "user") return userView(message, acts);
  if (message.role === "tool") return toolView(message);
  return answerView(message, acts);
}

function userView(message, acts) {
  const element = el("article.message.user", { aria: { label: "Question" } });
  const read = () =>
    fill(
      element,
      el("div.said", message.content),
      el(
        "div.actions",
        tool("Edit", "edit", write),
        tool("Copy", "copy", () => copy(message.content)),
      ),
    );
  const write = () => {
    if (acts.isBusy()) return;
    const area = el("textarea", { rows: 3, "aria-label": "Question", value: message.content });
    const cancel = () => {
      read();
      element.querySelector("button")?.focus();
    };
    const send = () => {
      if (area.value.trim()) acts.edit(message, area.value);
    };
    area.addEventListener("keydown", event => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    fill(
      element,
      el(
        "div.stack.editor",
        area,
        el(
          "div.row",
          button("Send again", { class: "primary tiny", click: send }),
          button("Cancel", { class: "tiny", click: cancel }),
          el("span.dim.small", "Removes what follows."),
        ),
      ),
    );
    area.focus();
    area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 2)}px`;
  };
  read();
  return { element, update: () => {} };
}

function toolView(message) {
  return {
    element: el(
      "article.message.tool",
      { aria: { label: "Result of a tool" } },
      el("div.label", "Result of the tool"),
      codeBlock(message.content),
    ),
    update: () => {},
  };
}

function answerView(message, acts) {
  const text = markdown();
  const thought = markdown();
  const reasoning = el("details.reasoning", { hidden: true }, el("summary", "Reasoning"), thought.element);
  const body = el("div.body");
  const calls = el("div.calls.stack");
  const problem = el("div.notice.bad", { hidden: true });
  const meta = el("div.meta");
  const actions = el("div.actions");
  const element = el(
    "article.message.answer",
    { aria: { label: "Answer" } },
    reasoning,
    body,
    calls,
    problem,
    meta,
    actions,
  );
  let asTokens = false,
    last = null,
    drawn = "",
    callsDrawn = "",
    touched = false;
  reasoning.firstChild.addEventListener("click", () => {
    touched = true;
  });

  function update() {
    const answer = message.answers[message.shown],
      busy = acts.isRunning(message);
    if (answer !== last) {
      drawn = callsDrawn = "";
      touched = false;
      last = answer;
    }
    element.setAttribute("aria-busy", String(busy));
    reasoning.hidden = !answer.reasoning;
    thought.show(answer.reasoning, !busy);
    if (!touched) reasoning.open = busy && !answer.content;
    if (asTokens && answer.tokens.length && !busy) {
      if (drawn !== "tokens") fill(body, tokenView(answer.tokens));
      drawn = "tokens";
    } else {
      text.show(answer.content, !busy);
      if (drawn !== "text") fill(body, text.element, el("span.waiting", { "aria-hidden": "true" }));
      drawn = "text";
    }
    element.classList.toggle("busy", busy);
    const calledNow = JSON.stringify([answer.calls, busy, acts.isLast(message)]);
    if (calledNow !== callsDrawn) fill(calls, callViews(answer, busy));
    callsDrawn = calledNow;
    problem.hidden = !answer.error;
    say(problem, answer.error);
    fill(meta, facts(answer, busy));
    if (!busy) fill(actions, buttons(answer));
    else fill(actions);
  }

  function buttons(answer) {
    const many = message.answers.length;
    return [
      many > 1 &&
        el(
          "span.versions",
          { role: "group", "aria-label": "Answers" },
          tool("Previous answer", "left", () => acts.choose(message, message.shown - 1), {
            disabled: message.shown === 0,
          }),
          el("span.number.small", `${message.shown + 1} / ${many}`),
          tool("Next answer", "right", () => acts.choose(message, message.shown + 1), {
            disabled: message.shown === many - 1,
          }),
        ),
      answer.content && tool("Copy", "copy", () => copy(answer.content)),
      acts.isLast(message) &&
        tool(
          answer.error ? "Try again" : "Regenerate",
          "again",
          () => acts.regenerate(message),
          answer.error ? { text: true } : {},
        ),
      answer.tokens.length > 0 &&
        button("Tokens", {
          class: "quiet tiny",
          aria: { pressed: asTokens },
          click: event => {
            asTokens = !asTokens;
            drawn = "";
            update();
            refocus(event, "Tokens");
          },
        }),
      tool("Show the request", "code", () => acts.showRequest(message)),
      answer.uid &&
        el("a.button.quiet.tiny", { href: pageOf(answer.uid), title: `Timeline of request ${answer.uid}` }, "Timeline"),
    ];
  }

  function refocus(event, label) {
    if (event.detail === 0) [...actions.querySelectorAll("button")].find(one => one.textContent === label)?.focus();
  }

  function callViews(answer, busy) {
    const forms = answer.calls.map(call => {
      const result = el("textarea", { rows: 2, class: "mono", "aria-label": `Result of ${call.name}` });
      return {
        call,
        result,
        element: el(
          "div.call",
          el("div.label", "Calls ", el("strong.mono", call.name || "a tool")),
          codeBlock(pretty(call.arguments)),
          !busy && acts.isLast(message) && el("div.field", el("div.hint", "Type what the tool returns."), result),
        ),
      };
    });
    const send = () =>
      acts.answerCall(
        message,
        forms.map(({ call, result }) => ({ callId: call.id, content: result.value })),
      );
    return [
      ...forms.map(form => form.element),
      forms.length > 0 &&
        !busy &&
        acts.isLast(message) &&
        el("div", button("Send the results", { class: "tiny", click: send })),
    ];
  }

  update();
  return { element, update };
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function facts(answer, busy) {
  const fact = (name, value, title) =>
    value !== null && el("span.fact", { title }, el("span", name, " "), el("b.number", value));
  const speed = rate(answer),
    { usage } = answer;
  return [
    answer.model && el("span.fact.model", answer.model),
    answer.note && el("span.badge.warn", answer.note),
    busy && el("span.badge.info", answer.firstMs === null ? "waiting" : "answering"),
    answer.stopped && el("span.badge.warn", "stopped"),
    answer.finish &&
      !["stop", "tool_calls"].includes(answer.finish) &&
      el("span.badge.warn", `ended: ${answer.finish}`),
    fact(
      "first token",
      answer.firstMs === null ? null : duration(answer.firstMs),
      "Time from sending the request to the first token (TTFT)",
    ),
    fact(
      "speed",
      speed === null ? null : `${count(Number(speed.toPrecision(3)))} tokens/s`,
      "Output tokens per second after the first one",
    ),
    fact(
      "tokens",
      usage && count(usage.output),
      usage?.of > 1 ? `Output tokens of ${usage.of} answers together` : "Output tokens",
    ),
    fact("prompt", usage && count(usage.prompt), "Tokens of the prompt"),
    fact("cached", usage && count(usage.cached), "Tokens of the prompt that came from the prefix cache"),
  ];
}
