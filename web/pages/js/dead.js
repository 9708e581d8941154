// Dead letters, for the admin: which there are, and a button that sends one again.

import { call, explain } from "./api.js";
import { button, toast } from "./dom.js";

/** Return {dead, next} of the letters that *query* asks for; null if the key is not the admin's. */
export async function letters(query) {
  const { admin } = await call("/v1/caller");
  return admin ? call(`/v1/dead?${new URLSearchParams(query)}`) : null;
}

/** *done(uid)* is called with the uid of the new request. */
export function requeueButton(letter, done, more = {}) {
  const requeue = async () => {
    send.disabled = true;
    try {
      const { uid } = await call(`/v1/dead/${encodeURIComponent(letter.id)}/requeue`, { method: "POST", body: {} });
      done(uid);
    } catch (error) {
      toast(explain(error));
      send.disabled = false;
    }
  };
  const title = "Send the dead letter again, under a new uid";
  const send = button("Requeue", { icon: "send", title, ...more, click: requeue });
  return send;
}
