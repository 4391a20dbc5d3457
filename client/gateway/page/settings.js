// The form: what is asked for beside the prompt. What is left empty is the server's to choose.

import { isNumber, parse, readNumber, write } from "./exact.js";

const at = (id) => document.getElementById(id);
const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };

const readStops = () =>
  at("stops").value.split("\n").filter(Boolean).map((line) => line.replace(/\\([nt\\])/g, (_, letter) => ESCAPES[letter]));

// JSON from a field; the browser says at the field what is wrong with it.
function readJson(field) {
  field.setCustomValidity("");
  try {
    return parse(field.value);
  } catch (error) {
    field.setCustomValidity(`This is not valid JSON: ${error.message}`);
    return undefined;
  }
}

function readForm(body) {
  const form = at("form-of-answer").value;
  at("schema").parentElement.hidden = form !== "json_schema";
  at("schema").setCustomValidity("");
  if (form === "json_object") body.response_format = { type: form };
  if (form === "json_schema") body.response_format = { type: form, json_schema: { name: "answer", strict: true, schema: readJson(at("schema")) } };
}

function readTools(body) {
  at("tools").setCustomValidity("");
  if (!at("tools").value.trim()) return;
  body.tools = readJson(at("tools"));
  if (at("tool-choice").value !== "auto") body.tool_choice = at("tool-choice").value;
}

// What the template is told.
function readVariables(body) {
  const field = at("variables");
  if (at("of-template").hidden || !field.value.trim()) return;
  const value = readJson(field);
  if (value !== undefined && (value === null || typeof value !== "object" || Array.isArray(value))) {
    field.setCustomValidity('This is not a JSON object, such as {"enable_thinking": false}');
  }
  body.chat_template_kwargs = value;
}

export function readSettings(mode) {
  const body = {};
  for (const field of at("form").querySelectorAll("input[type=number][name]")) {
    if (field.value) body[field.name] = readNumber(field.value);
  }
  const stops = readStops();
  if (stops.length) body.stop = stops;
  readForm(body);
  at("tools").setCustomValidity("");
  at("variables").setCustomValidity("");
  if (mode === "chat") {
    readTools(body);
    readVariables(body);
  }
  const speculative = {};
  if (at("method").value) speculative.method = at("method").value;
  if (at("drafts").value) speculative.num_speculative_tokens = readNumber(at("drafts").value);
  if (Object.keys(speculative).length) body.speculative = speculative;
  return body;
}

// Whether all of it can be sent; else the field that is wrong is shown, and says so.
export function checkSettings(mode) {
  readSettings(mode);
  for (const field of at("form").querySelectorAll(":invalid")) field.closest("details")?.setAttribute("open", "");
  return at("form").reportValidity();
}

// The methods that requests may choose, and what stands for fields that are left empty.
export function offer(model) {
  const chosen = at("method").value, methods = draftingMethods(model);
  const first = methods.length ? `default (${model.method})` : "none is loaded";
  at("method").replaceChildren(new Option(first, ""), ...methods.map((method) => new Option(method, method)));
  at("method").value = methods.includes(chosen) ? chosen : "";
  for (const field of [at("method"), at("drafts"), at("compare")]) field.disabled = !methods.length;
  if (!methods.length) at("compare").checked = false;
  const variables = model.template_variables ?? [];
  at("of-template").hidden = !variables.length;
  at("variable-names").textContent = variables.join(", ");
  at("variables").placeholder = variables.length ? `{"${variables[0]}": …}` : "";
  for (const [name, value] of Object.entries(model.sampling_defaults ?? {})) {
    const field = at("form").elements.namedItem(name);
    if (field) field.placeholder = String(value);
  }
  return methods;
}

export const draftingMethods = (model) => (model.methods ?? []).filter((method) => method !== "none" && method !== "naive");

// In one line, for the run's own pane.
export const describe = ({ model, ...body }) =>
  [model, ...Object.entries(body).map(([name, value]) => describeValue(name, value))].filter(Boolean).join(" · ");

function describeValue(name, value) {
  if (name === "speculative") return value.method ?? (value.num_speculative_tokens ? `${value.num_speculative_tokens} drafts` : "no drafts");
  if (name === "response_format") return value.type.replace("_", " ");
  if (name === "chat_template_kwargs") return Object.entries(value).map(([key, told]) => `${key} ${write(told)}`).join(" · ");
  return isNumber(value) ? `${name.replaceAll("_", " ")} ${write(value)}` : "";
}
