// What the browser keeps by name: in this tab, or for good. Where storage is off, it is kept as long as the page.
//
//   inTab.get(name) -> the text, or null      inTab.set(name, text)   "" or null removes it      forGood: the same

export const inTab = storage(() => sessionStorage);
export const forGood = storage(() => localStorage);

function storage(open) {
  const kept = new Map();
  return {
    get(name) {
      try {
        return open().getItem(name) ?? kept.get(name) ?? null;
      } catch {
        return kept.get(name) ?? null;
      }
    },
    set(name, text) {
      kept.set(name, text || null);
      try {
        if (text) open().setItem(name, text);
        else open().removeItem(name);
      } catch {
        /* it is in kept */
      }
    },
  };
}
