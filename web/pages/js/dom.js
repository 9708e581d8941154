// Small helpers to make elements. Text only ever becomes a text node: nothing here parses HTML.
//
//   el("p.dim.small", "text", child, null)       an element with these classes
//   el("p.dim", {title: "..", click, data: {uid}, aria: {label: ".."}}, "text", child)      the same, with properties; a
//                                    function listens to the event of its name
//   svg("path", {d: ".."})           the same for SVG
//   icon("copy")                     a drawing of 16 x 16 in the text's colour, hidden from screen readers
//   button("Stop", {icon: "stop", class: "danger", click})   with text: false only the icon is visible
//   tool("Edit", "edit", click, properties)   a quiet one of which only the icon is visible
//   ticked("`Esc` stops", "kbd")     the text in pieces, of which those in backticks are elements
//   table(["name", ..], rows, properties)   a table with these columns, or <th>; rows: its <tr>, or its <tbody>
//   tabs(label, names, choose, at)   buttons of which one is pressed; *choose* is given its place
//   figures("dl.facts") -> {node, show([[name, value], ..])}   names and values, which change and stay the same nodes
//   fill(node, ...children)          replaces what the node holds      say(node, text)   only if it says something else
//   keep(node, children)             makes these its children, and moves only those that are elsewhere
//   find(selector, root), all(selector, root)   find throws if there is none
//   announce(text)                   says it to screen readers      toast(text)   shows it for a while, and says it
//   copy(text)                       to the clipboard, with a toast
//   dialog({title, narrow}, ...children) -> the <dialog>; show with .showModal(), removed when it closes
//   ask({title, action, class}, act, ...children)   shows a dialog that calls *act* if the user agrees -> the <dialog>
//   everyFrame(draw)                 returns a function that asks for one draw in the next frame, however often it is
//                                    called

const SVG = "http://www.w3.org/2000/svg";
const FORBIDDEN = new Set(["innerHTML", "outerHTML", "style", "srcdoc"]);

export function el(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  return furnish(document.createElement(name), classes, rest);
}

export function svg(name, ...rest) {
  return furnish(document.createElementNS(SVG, name), [], rest);
}

function furnish(node, classes, [first, ...rest]) {
  const hasProperties = Object.getPrototypeOf(first ?? "") === Object.prototype;
  const { class: more, ...properties } = hasProperties ? first : {};
  const named = [classes, more].flat().filter(Boolean).join(" ");
  if (named) node.setAttribute("class", named);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (FORBIDDEN.has(name) || name.startsWith("on")) throw new Error(`el: ${name} is not allowed`);
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "aria")
      for (const [key, said] of Object.entries(value)) {
        if (said !== null && said !== undefined) node.setAttribute(`aria-${key}`, String(said));
      }
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...visible(hasProperties ? rest : [first, ...rest]));
  return node;
}

const visible = children => children.flat().filter(child => child !== null && child !== undefined && child !== false);

export function fill(node, ...children) {
  node.replaceChildren(...visible(children));
  return node;
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function table(names, rows, properties = {}) {
  const head = names.map(name => (name instanceof Node ? name : el("th", { scope: "col" }, name)));
  return el("table.table", properties, el("thead", el("tr", head)), rows instanceof Node ? rows : el("tbody", rows));
}

export function tabs(label, names, choose, pressed = 0) {
  const take = at => {
    buttons.forEach((each, place) => each.setAttribute("aria-pressed", String(place === at)));
    choose(at);
  };
  const buttons = names.map((name, at) =>
    el("button", { type: "button", aria: { pressed: at === pressed }, click: () => take(at) }, name),
  );
  return el("div.tabs", { role: "group", aria: { label } }, buttons);
}

export function figures(tag) {
  const [node, values] = [el(tag), new Map()];
  const show = entries => {
    for (const [name, value] of entries) {
      if (!values.has(name)) {
        values.set(name, el("dd.number"));
        node.append(el("div", el("dt", name), values.get(name)));
      }
      const shown = values.get(name);
      if (typeof value === "string") say(shown, value);
      else if (shown.firstChild !== value) fill(shown, value);
    }
  };
  return { node, show };
}

export function keep(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

export function find(selector, root = document) {
  const found = root.querySelector(selector);
  if (!found) throw new Error(`nothing matches ${selector}`);
  return found;
}

export const all = (selector, root = document) => [...root.querySelectorAll(selector)];

const ICONS = {
  logo: "M2 4.5h12M2 8h12M2 11.5h7M12 11.5h2",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
  edit: "M2.5 13.5l.6-3L10.5 3l2.5 2.5-7.5 7.4zM9 4.5L11.5 7",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13.2 1.8v3h-3",
  stop: "M4 4h8v8H4z",
  send: "M8 13.5v-11M3.5 7L8 2.5 12.5 7",
  plus: "M8 3v10M3 8h10",
  close: "M3.5 3.5l9 9M12.5 3.5l-9 9",
  trash: "M2.5 4.5h11M6 4.5v-2h4v2M4 4.5l.7 9h6.6l.7-9M6.7 7v4M9.3 7v4",
  list: "M2 4h12M2 8h12M2 12h12",
  sliders: "M2 4.5h6M12 4.5h2M10 2.5v4M2 11.5h2M8 11.5h6M6 9.5v4",
  columns: "M2 2.5h12v11H2zM8 2.5v11",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M3 13l1-1M12 4l1-1",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7z",
  system: "M2 3h12v8H2zM5.5 13.5h5",
  key: "M6.5 9.5a3.5 3.5 0 1 1 .6-.6L12 13.5h2v-2M9.5 11h2",
  code: "M5.5 4L2 8l3.5 4M10.5 4L14 8l-3.5 4",
  left: "M10 3.5L5.5 8l4.5 4.5",
  right: "M6 3.5L10.5 8 6 12.5",
  save: "M8 2.5v8M4.5 7L8 10.5 11.5 7M2.5 13.5h11",
  open: "M8 10.5v-8M4.5 6L8 2.5 11.5 6M2.5 13.5h11",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9M10.5 10.5l3.5 3.5",
  play: "M4.5 3v10l8-5z",
  pause: "M5 3v10M11 3v10",
  link: "M6.5 9.5l3-3M7 4.5l1.5-1.5a3.2 3.2 0 0 1 4.5 4.5L11.5 9M9 11.5L7.5 13A3.2 3.2 0 0 1 3 8.5L4.5 7",
};

export function icon(name) {
  if (!ICONS[name]) throw new Error(`no icon is called ${name}`);
  return svg(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", focusable: "false" },
    svg("path", {
      d: ICONS[name],
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.5,
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}

export function button(label, { icon: drawing, class: more = "", text = true, ...properties } = {}) {
  return el(
    "button",
    {
      type: "button",
      class: ["button", !text && "icon", more],
      ...(text ? {} : { title: label, "aria-label": label }),
      ...properties,
    },
    drawing && icon(drawing),
    text && el("span", label),
  );
}

export const tool = (label, drawing, click, more = {}) =>
  button(label, { icon: drawing, text: false, class: "quiet tiny", click, ...more });

export const ticked = (text, tag) => text.split("`").map((part, at) => (at % 2 ? el(tag, part) : part));

let region = null;
export function announce(text) {
  if (!region) document.body.append((region = el("div.hidden-text", { role: "status", "aria-live": "polite" })));
  region.textContent = "";
  region.textContent = text;
}

let shown = null;
export function toast(text) {
  shown?.remove();
  const mine = (shown = el("div.toast", text));
  document.body.append(mine);
  announce(text);
  setTimeout(() => mine.remove(), 3000);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // the clipboard needs https or localhost: the older way works everywhere
    const area = el("textarea.hidden-text", { value: text, "aria-hidden": "true" });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("Copied");
}

export function dialog({ title, narrow = false }, ...children) {
  const heading = el("h2", { id: `dialog-${Math.random().toString(36).slice(2)}` }, title);
  const box = el(
    "dialog",
    { class: ["dialog", narrow && "narrow"], aria: { labelledby: heading.id } },
    el("div.body", heading, ...children),
  );
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  return box;
}

export function ask({ title, action, class: kind = "primary" }, act, ...children) {
  const agree = event => {
    event.preventDefault();
    box.close();
    act();
  };
  const box = dialog(
    { title, narrow: true },
    el(
      "form.stack",
      { submit: agree },
      children,
      el(
        "div.actions",
        button("Cancel", { click: () => box.close() }),
        button(action, { type: "submit", class: kind }),
      ),
    ),
  );
  box.showModal();
  box.querySelector("input")?.select();
  return box;
}

export function everyFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}
