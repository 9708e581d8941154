// The settings of the columns: system text and sampling fields. With two columns it shows one at a time.

import { button, el, fill, tabs } from "../dom.js";
import { fieldsForm } from "./fields.js";

/** *page*: {sides(), schemas(), problem(), onChange(), closeButton()}. Returns {show(at), wrong()}: *wrong* gives [field,
 *  sentence], or null. */
export function settingsPanel(root, page) {
  let shown = 0;
  const forms = new WeakMap(); // by side: a form that was left with something wrong stays as it is

  function formOf(side) {
    if (!forms.has(side)) forms.set(side, fieldsForm(page.schemas(), side.fields, page.onChange));
    return forms.get(side);
  }

  function show(at = shown) {
    const sides = page.sides();
    shown = Math.min(at, sides.length - 1);
    const side = sides[shown];
    const system = el("textarea", {
      id: "system",
      rows: 4,
      value: side.system,
      placeholder: "Who the model is, and how it answers",
      input: () => {
        side.system = system.value;
        page.onChange();
      },
    });
    const reset = button("Reset", {
      class: "tiny",
      click: () => {
        side.system = "";
        for (const name of Object.keys(side.fields)) delete side.fields[name];
        forms.delete(side);
        page.onChange();
        show();
        root.querySelector("h2").focus();
      },
    });
    fill(
      root,
      el(
        "div.row.panel-head",
        el("h2.grow", { tabindex: -1 }, "Settings"),
        sides.length > 1 && tabs("Settings of column", ["A", "B"], choose, shown),
        reset,
        page.closeButton(),
      ),
      el("div.field", el("label", { for: "system" }, "System text"), system),
      page.schemas()
        ? formOf(side).element
        : el(
            "p",
            { class: page.problem() ? "notice bad" : "dim" },
            page.problem() || "Reading the fields that the server takes ..",
          ),
      el(
        "p.dim.small",
        "An empty field is not sent: the model's own value holds. ",
        el("a", { href: "/docs" }, "What the server takes"),
      ),
    );
  }

  function choose(at) {
    show(at);
    root.querySelectorAll(".tabs > button")[at].focus();
  }

  return {
    show,
    wrong: () =>
      page
        .sides()
        .map(side => forms.get(side)?.wrong())
        .find(Boolean) ?? null,
  };
}
