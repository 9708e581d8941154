// The list of conversations: open, rename, delete, export, import.

import { button, dialog, el, fill, toast } from "../dom.js";
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
    on: { change: read },
  });
  const list = el("ul", { class: "plain" });
  fill(
    root,
    el("div", { class: "row panel-head" }, el("h2", { class: "grow" }, "Conversations"), page.closeButton()),
    button("New conversation", { icon: "plus", on: { click: page.add } }),
    list,
    el(
      "div",
      { class: "row files" },
      button("Export", {
        icon: "save",
        class: "tiny quiet",
        title: "Write all conversations to a file",
        on: { click: write },
      }),
      button("Import", {
        icon: "open",
        class: "tiny quiet",
        title: "Read conversations from a file",
        on: { click: () => file.click() },
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
              on: { click: () => page.open(conversation) },
            },
            titleOf(conversation),
          ),
          button(`Rename: ${titleOf(conversation)}`, {
            icon: "edit",
            text: false,
            class: "quiet tiny",
            on: { click: () => rename(conversation) },
          }),
          button(`Delete: ${titleOf(conversation)}`, {
            icon: "trash",
            text: false,
            class: "quiet tiny",
            on: { click: () => remove(conversation) },
          }),
        );
      }),
    );
  }

  function rename(conversation) {
    const input = el("input", { id: "title", value: titleOf(conversation), maxlength: 200 });
    const box = dialog(
      { title: "Rename", narrow: true },
      el(
        "form",
        {
          class: "stack",
          on: {
            submit: event => {
              event.preventDefault();
              box.close();
              page.rename(conversation, input.value.trim());
            },
          },
        },
        el("div", { class: "field" }, el("label", { for: "title" }, "Title"), input),
        el(
          "div",
          { class: "actions" },
          button("Cancel", { on: { click: () => box.close() } }),
          el("button", { type: "submit", class: "button primary" }, "Rename"),
        ),
      ),
    );
    box.showModal();
    input.select();
  }

  function remove(conversation) {
    const box = dialog(
      { title: "Delete this conversation?", narrow: true },
      el("p", {}, titleOf(conversation)),
      el("p", { class: "dim" }, "This browser has the only copy."),
      el(
        "div",
        { class: "actions" },
        button("Cancel", { on: { click: () => box.close() } }),
        button("Delete", {
          class: "danger",
          on: {
            click: () => {
              box.close();
              page.remove(conversation);
            },
          },
        }),
      ),
    );
    box.showModal();
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
        el("p", { class: "notice bad" }, error.message ?? explain(error)),
        el("div", { class: "actions" }, button("Close", { on: { click: () => box.close() } })),
      );
      box.showModal();
    }
  }

  return { show };
}

export const titleOf = conversation => conversation.title || "New conversation";
