// The bar at the top of each page: where one is, the API key, the theme. A page has <header class="bar"></header> and
// calls frame("Playground"), frame("Pipeline") or frame("") once. Also gives js/api.js the dialog that asks for a key.
// *onKey* is called after the user changed the key here: what the page shows may belong to another key.

import { apiKey, askWith, needsKey, onKeyChange, setApiKey } from "./api.js";
import { ask, button, el, fill, find, icon } from "./dom.js";
import { forGood } from "./storage.js";

const PLACES = [
  ["Playground", "/"],
  ["Pipeline", "/pipeline"],
];
const THEMES = [
  ["", "system", "Theme: as the system"],
  ["light", "sun", "Theme: light"],
  ["dark", "moon", "Theme: dark"],
];

export function frame(current, onKey = () => {}) {
  const links = PLACES.map(([name, href]) =>
    el("a", { href, aria: { current: name === current ? "page" : null } }, name),
  );
  const key = button("API key", { icon: "key", class: "quiet", click: () => changeKey(onKey) });
  const showKey = () => {
    key.hidden = !needsKey() && !apiKey();
  };
  onKeyChange(showKey);
  showKey();
  fill(
    find("header.bar"),
    el("a.skip", { href: "#main" }, "Skip to the content"),
    el("a.brand", { href: "/", aria: { label: "MiniSGL" } }, icon("logo"), el("span", "MiniSGL")),
    el("nav", { aria: { label: "Pages" } }, links),
    el("span.spacer"),
    key,
    el("a.button.quiet.wide", { href: "/docs" }, "API"),
    themeSwitch(),
  );
  askWith(sentence => askKey(sentence));
}

function themeSwitch() {
  const chosen = () =>
    Math.max(
      0,
      THEMES.findIndex(([name]) => name === (document.documentElement.dataset.theme ?? "")),
    );
  const toggle = button("Theme", {
    icon: "system",
    class: "quiet",
    text: false,
    click: () => {
      choose(THEMES[(chosen() + 1) % THEMES.length][0]);
      show();
    },
  });
  const show = () => {
    const [, drawing, label] = THEMES[chosen()];
    fill(toggle, icon(drawing));
    toggle.title = label;
    toggle.setAttribute("aria-label", label);
  };
  show();
  return toggle;
}

function choose(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  forGood.set("minisgl.theme", theme);
  dispatchEvent(new CustomEvent("themechange")); // charts on a canvas draw again
}

async function changeKey(onKey) {
  const given = await askKey("The key stays in this tab, and ends with it. Leave it empty to remove it.");
  if (given === null) return;
  setApiKey(given);
  onKey();
}

/** Ask for a key; resolves to it ("" for none), or null if the user closes the dialog. */
function askKey(sentence) {
  const input = el("input", {
    id: "api-key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    value: apiKey() ?? "",
  });
  return new Promise(resolve => {
    let given = null;
    const take = () => {
      given = input.value.trim();
    };
    const box = ask(
      { title: "API key", action: "Use this key" },
      take,
      el("p.dim", sentence),
      el("div.field", el("label", { for: "api-key" }, "Key"), input),
    );
    box.addEventListener("close", () => resolve(given));
  });
}
