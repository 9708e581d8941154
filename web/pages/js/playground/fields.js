// The form of the sampling fields, made from ChatRequest in /openapi.json: a field that the server learns appears by
// itself, with its description and an example.
// A value that is not a value of its field is shown as wrong and is not sent.
//
//   const form = fieldsForm(read, values, onChange);   form.element;   form.wrong() -> [name, sentence] or null
//   readSchemas() -> read: {chat, schemas, defaults} from the server; *defaults* are the model's own values
//
// *values* is an object by field name, without the fields that are not set; the form writes into it.

import { call } from "../api.js";
import { el, fill, ticked } from "../dom.js";

const OWN = new Set(["messages", "model", "prompt", "stream_options"]); // the page itself says these
const FIRST = "temperature top_p top_k min_p max_completion_tokens seed stop logprobs top_logprobs n".split(" ");
export async function readSchemas() {
  const [document, properties] = await Promise.all([call("/openapi.json"), call("/props")]);
  const { schemas } = document.components;
  return { chat: schemas.ChatRequest, schemas, defaults: properties.default_generation_settings?.params ?? {} };
}

/** Return the schema without the alternative `null`, and with references followed. */
function plain(schema, schemas) {
  const { $ref, anyOf, oneOf, ...rest } = schema;
  if ($ref) return { ...plain(schemas[$ref.split("/").pop()] ?? {}, schemas), ...rest };
  const either = (anyOf ?? oneOf)?.filter(one => one.type !== "null");
  if (!either) return schema;
  if (either.length === 1) return { ...plain(either[0], schemas), ...rest };
  return { ...rest, either: either.map(one => plain(one, schemas)) };
}

/** Return which control a field has: choice, number, integer, numbers, texts, text or json. */
function kindOf(schema) {
  const types = new Set(
    (schema.either ?? [schema]).flatMap(one => (one.either ?? [one]).map(each => (each.enum ? "enum" : each.type))),
  );
  if (schema.type === "boolean" || schema.enum) return "choice";
  if (schema.type === "integer" || schema.type === "number") return schema.type;
  const list =
    schema.type === "array"
      ? schema
      : (schema.either ?? []).flatMap(one => one.either ?? [one]).find(one => one.type === "array");
  if (list && ["integer", "number"].includes(list.items?.type)) return "numbers";
  if (list && list.items?.type === "string") return "texts";
  if (types.has("object")) return types.has("string") ? "jsonOrText" : "json";
  if (types.size === 1 && types.has("string")) return "text";
  return "json";
}

export function fieldsForm({ chat, schemas, defaults }, values, onChange) {
  const names = Object.keys(chat.properties).filter(name => !OWN.has(name));
  const first = FIRST.filter(name => names.includes(name));
  const rest = names.filter(name => !first.includes(name)).sort();
  const wrong = new Map();
  const controls = new Map([...first, ...rest].map(name => [name, control(name)]));
  const more = el(
    "details.more",
    el("summary", `All other fields (${rest.length})`),
    el(
      "div.fields",
      rest.map(name => controls.get(name).element),
    ),
  );
  const nothing = el("p.dim.small", { hidden: true }, "No field has this in its name.");
  const search = el("input", {
    type: "search",
    id: "field-search",
    placeholder: "Search fields",
    "aria-label": "Search fields",
    input: filter,
  });
  const element = el(
    "div.stack",
    search,
    nothing,
    el(
      "div.fields",
      first.map(name => controls.get(name).element),
    ),
    more,
  );
  more.open = rest.some(name => name in values);
  return { element, wrong: () => [...wrong][0] ?? null };

  function filter() {
    const words = search.value.trim().toLowerCase().replaceAll(" ", "_");
    let found = 0;
    for (const [name, { element: field }] of controls) {
      field.hidden = !name.includes(words);
      found += field.hidden ? 0 : 1;
    }
    nothing.hidden = found > 0;
    more.hidden = rest.every(name => controls.get(name).element.hidden);
    if (words) more.open = true;
  }

  function control(name) {
    const schema = plain(chat.properties[name], schemas);
    const kind = kindOf(schema);
    const id = `field-${name}`;
    const complaint = el("div.wrong", { id: `${id}-wrong`, hidden: true });
    const written = writtenBy(KINDS[kind].write, values, name);
    const input = KINDS[kind].input({ id, schema, name, aria: { describedby: `${id}-hint ${id}-wrong` }, written });
    if (name in defaults) input.setAttribute("placeholder", String(defaults[name]));
    else if (schema.examples) input.setAttribute("placeholder", JSON.stringify(schema.examples[0]));
    const note = el(
      "div.hint",
      { id: `${id}-hint` },
      ticked([KINDS[kind].note, schema.description, bounds(schema)].filter(Boolean).join(" "), "code"),
    );
    const box = el(
      "div",
      { class: ["field", name in values && "set"] },
      el("label", { for: id, class: "mono" }, name),
      input,
      complaint,
      note,
    );
    const read = () => {
      let sentence = "";
      try {
        const value = input.value.trim() === "" ? undefined : KINDS[kind].read(input.value, schema);
        if (value === undefined) delete values[name];
        else values[name] = value;
      } catch (error) {
        delete values[name];
        sentence = error.message;
      }
      if (sentence) wrong.set(name, sentence);
      else wrong.delete(name);
      fill(complaint, sentence).hidden = !sentence;
      input.setAttribute("aria-invalid", String(Boolean(sentence)));
      box.classList.toggle("set", name in values);
      onChange(name);
    };
    input.addEventListener("input", read);
    if (input.matches("select")) input.addEventListener("change", read); // some browsers send one of the two
    return { element: box };
  }
}

/** Return a value as its control shows it. One that no control can show, such as of an edited file, is dropped. */
function writtenBy(write, values, name) {
  if (!(name in values)) return "";
  try {
    return write(values[name]);
  } catch {
    delete values[name];
    return "";
  }
}

function bounds(schema) {
  const told = [
    ["minimum", "from "],
    ["exclusiveMinimum", "above "],
    ["maximum", "to "],
    ["exclusiveMaximum", "below "],
  ]
    .filter(([name]) => schema[name] !== undefined && Math.abs(schema[name]) < 2 ** 31 - 1)
    .map(([name, word]) => word + schema[name]);
  return told.length ? `Values ${told.join(" ")}.` : "";
}

function number(text, schema) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Error(`${text} is not a number.`);
  const below = value < (schema.minimum ?? -Infinity) || value <= (schema.exclusiveMinimum ?? -Infinity);
  const above = value > (schema.maximum ?? Infinity) || value >= (schema.exclusiveMaximum ?? Infinity);
  if (below || above) throw new Error(`${text} is outside of the range. ${bounds(schema)}`);
  return value;
}

function integer(text, schema) {
  const value = number(text, schema);
  if (!Number.isInteger(value)) throw new Error(`${text} is not a whole number.`);
  if (!Number.isSafeInteger(value))
    throw new Error(`A browser can send whole numbers up to ${Number.MAX_SAFE_INTEGER} only.`);
  return value;
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
}

const lines = text =>
  text
    .split("\n")
    .filter(line => line !== "")
    .map(line => line.replace(/\\(n|t|\\)/g, (_, sign) => ({ n: "\n", t: "\t", "\\": "\\" })[sign]));
const escaped = text => text.replace(/[\\\n\t]/g, sign => ({ "\n": "\\n", "\t": "\\t", "\\": "\\\\" })[sign]);
const area =
  rows =>
  ({ id, aria, written }) =>
    el("textarea", { id, aria, rows, class: "mono", spellcheck: "false", value: written });
const line = ({ id, aria, written }) =>
  el("input", { id, aria, type: "text", spellcheck: "false", autocomplete: "off", value: written });
const numeric = ({ id, aria, written }) =>
  el("input", { id, aria, type: "text", inputmode: "decimal", autocomplete: "off", value: written });

function choice({ id, aria, schema, written }) {
  const options = schema.enum
    ? schema.enum.map(value => [String(value), String(value)])
    : [
        ["true", "yes"],
        ["false", "no"],
      ];
  return el(
    "select",
    { id, aria },
    [["", "default"], ...options].map(([value, text]) => el("option", { value, selected: value === written }, text)),
  );
}

const KINDS = {
  choice: {
    input: choice,
    read: (text, schema) => (schema.enum ? schema.enum.find(value => String(value) === text) : text === "true"),
    write: String,
  },
  number: { input: numeric, read: (text, schema) => number(text.trim(), schema), write: String },
  integer: { input: numeric, read: (text, schema) => integer(text.trim(), schema), write: String },
  numbers: {
    input: line,
    note: "Numbers with commas between them.",
    read: text =>
      text
        .split(/[\s,]+/)
        .filter(Boolean)
        .map(word => integer(word, {})),
    write: list => list.join(", "),
  },
  texts: {
    input: area(2),
    note: "One on each line; \\n is a line break.",
    read: lines,
    write: list => [list].flat().map(escaped).join("\n"),
  },
  text: { input: line, read: text => text, write: String },
  json: { input: area(3), note: "JSON.", read: json, write: value => JSON.stringify(value, null, 1) },
  jsonOrText: {
    input: area(3),
    note: "JSON or text.",
    read: text => {
      try {
        const value = JSON.parse(text);
        return typeof value === "object" && value ? value : text;
      } catch {
        return text;
      }
    },
    write: value => (typeof value === "string" ? value : JSON.stringify(value, null, 1)),
  },
};
