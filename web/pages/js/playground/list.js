// The list of conversations: open, rename, delete, export, import.

import { ask, button, dialog, el, fill, toast, tool } from "../dom.js";
import { explain } from "../api.js";
import { asFile, fromFile } from "./store.js";

/** *page*: {all(), current(), open(conversation), add(), remove(conversation), rename(conversation, title), take(list),
 *  closeButton()}. Returns {show()}. */
export function conversationList(root, page) {
  const file = el("input", {
    type: "file",
    accept: "application/json,.json",
    class: "hidden-text",
    tabindex: -1,
    "aria-hidden": "true",
    id: "import",
    change: read,
  });
  const list = el("ul.plain");
  fill(
    root,
    el("div.row.panel-head", el("h2.grow", "Conversations"), page.closeButton()),
    button("New conversation", { icon: "plus", click: page.add }),
    list,
    el(
      "div.row.files",
      button("Export", { icon: "save", class: "tiny quiet", title: "Write all conversations to a file", click: write }),
      button("Import", {
        icon: "open",
        class: "tiny quiet",
        title: "Read conversations from a file",
        click: () => file.click(),
      }),
      file,
    ),
  );

  function show() {
    const sorted = [...page.all()].sort((one, other) => other.changedMs - one.changedMs);
    fill(
      list,
      sorted.map(conversation => {
        const open = conversation === page.current();
        return el(
          "li",
          { class: open ? "open" : null },
          el(
            "button",
            {
              type: "button",
              class: "title",
              aria: { current: open ? "true" : null },
              click: () => page.open(conversation),
            },
            titleOf(conversation),
          ),
          tool(`Rename: ${titleOf(conversation)}`, "edit", () => rename(conversation)),
          tool(`Delete: ${titleOf(conversation)}`, "trash", () => remove(conversation)),
        );
      }),
    );
  }

  function rename(conversation) {
    const input = el("input", { id: "title", value: titleOf(conversation), maxlength: 200 });
    ask(
      { title: "Rename", action: "Rename" },
      () => page.rename(conversation, input.value.trim()),
      el("div.field", el("label", { for: "title" }, "Title"), input),
    );
  }

  function remove(conversation) {
    ask(
      { title: "Delete this conversation?", action: "Delete", class: "danger" },
      () => page.remove(conversation),
      el("p", titleOf(conversation)),
      el("p.dim", "This browser has the only copy."),
    );
  }

  function write() {
    const url = URL.createObjectURL(
      asFile(page.all().filter(({ sides }) => sides.some(({ messages }) => messages.length))),
    );
    const link = el("a", {
      href: url,
      download: `minisgl-conversations-${new Date().toISOString().slice(0, 10)}.json`,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  async function read() {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    try {
      const found = await fromFile(chosen);
      await page.take(found);
      toast(`Imported ${found.length} conversation${found.length === 1 ? "" : "s"}.`);
    } catch (error) {
      const box = dialog(
        { title: "The file was not imported", narrow: true },
        el("p.notice.bad", error.message ?? explain(error)),
        el("div.actions", button("Close", { click: () => box.close() })),
      );
      box.showModal();
    }
  }

  return { show };
}

const titleOf = conversation => conversation.title || "New conversation";
