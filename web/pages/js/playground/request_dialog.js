// The dialog that shows a request for a terminal, for Python and as JSON, and the body that came back in one piece.

import { apiKey } from "../api.js";
import { button, copy, dialog, el, tabs } from "../dom.js";
import { asCurl, asPython } from "./request.js";

export function showRequest(body, answered = null) {
  const { origin } = location;
  const withKey = Boolean(apiKey());
  const forms = {
    curl: asCurl(body, origin, withKey),
    Python: asPython(body, origin, withKey),
    JSON: JSON.stringify(body, null, 2),
    ...(answered && { Answer: JSON.stringify(answered, null, 2) }),
  };
  const shown = el("pre", { tabindex: 0, role: "region", "aria-label": "The request" }, forms.curl);
  const choose = at => {
    shown.textContent = Object.values(forms)[at];
  };
  const box = dialog(
    { title: "The request" },
    el("div", tabs("Form of the request", Object.keys(forms), choose)),
    el("div.code", shown),
    el(
      "div.actions",
      button("Copy", { icon: "copy", click: () => copy(shown.textContent) }),
      button("Close", { class: "primary", click: () => box.close() }),
    ),
  );
  box.showModal();
}
