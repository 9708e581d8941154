// The panels beside the chat. Where the window is narrow they lie over it, one at a time, and close by themselves.

import { button, el } from "../dom.js";
import { forGood } from "../storage.js";

const NARROW = matchMedia("(max-width: 68rem)");

/** *named*: name -> [label, icon]. Returns each panel as {panel, toggle, show(visible), closeButton()}, and
 *  closeWhereNarrow(), place() and closeByKey(), which says whether there was one to close. */
export function makeDrawers(named) {
  const drawers = Object.entries(named).map(([name, [label, drawing]]) => [
    name,
    drawer(name, label, drawing, showOne),
  ]);
  const all = drawers.map(([, one]) => one);

  function showOne(mine, visible, remember = !NARROW.matches) {
    if (visible && NARROW.matches) for (const other of all) if (other !== mine) other.set(false);
    mine.set(visible);
    if (visible && NARROW.matches) mine.panel.querySelector("button, input, textarea")?.focus();
    if (remember) mine.remember(visible);
    document.body.classList.toggle("drawn", NARROW.matches && all.some(one => !one.panel.hidden));
  }

  function closeWhereNarrow() {
    if (NARROW.matches) for (const one of all) showOne(one, false);
  }

  function closeByKey() {
    const shown = NARROW.matches && all.find(one => !one.panel.hidden);
    if (!shown) return false;
    showOne(shown, false);
    shown.toggle.focus();
    return true;
  }

  function place() {
    for (const one of all) showOne(one, !NARROW.matches && one.wanted(), false);
  }
  NARROW.addEventListener("change", place);
  return { ...Object.fromEntries(drawers), closeWhereNarrow, closeByKey, place };
}

function drawer(name, label, drawing, showOne) {
  const key = `minisgl.playground.${name}`;
  const panel = el("aside", { id: name, class: "panel", "aria-label": label, hidden: true });
  const toggle = button(label, {
    icon: drawing,
    class: "quiet",
    aria: { expanded: "false", controls: name },
    click: () => showOne(mine, panel.hidden),
  });
  const mine = { panel, toggle, set, wanted, remember, show: visible => showOne(mine, visible), closeButton };

  function set(visible) {
    panel.hidden = !visible;
    toggle.setAttribute("aria-expanded", String(visible));
  }

  function wanted() {
    return forGood.get(key) !== "closed";
  }

  function remember(visible) {
    forGood.set(key, visible ? "open" : "closed");
  }

  function closeButton() {
    const close = () => {
      showOne(mine, false);
      toggle.focus();
    };
    return button(`Close: ${label}`, { icon: "close", text: false, class: "quiet tiny close", click: close });
  }

  return mine;
}
