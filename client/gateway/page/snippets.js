// A request as commands and programs that people paste.

import { isNumber, write } from "./exact.js";

// OpenAI's client knows these by name; the rest goes into `extra_body`.
const OPENAI = new Set([
  "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty",
  "tools", "tool_choice",
]);

export function asCurl({ path, body }, root, hasKey) {
  const quoted = write(body, 2).replaceAll("'", `'\\''`);
  const key = hasKey ? ` -H "authorization: Bearer $API_KEY"` : "";
  return `curl ${root}${path} -H 'content-type: application/json'${key} -d '${quoted}'`;
}

export function asPython({ path, body }, root, hasKey) {
  const isChat = path.includes("chat");
  // The client's own type for a completion has no response_format.
  const isKnown = (name) => OPENAI.has(name) || (isChat && name === "response_format");
  const entries = Object.entries(body), own = entries.filter(([name]) => isKnown(name)), extra = entries.filter(([name]) => !isKnown(name));
  const parameters = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) parameters.push(`    extra_body=${literal(Object.fromEntries(extra))},`);
  const key = hasKey ? `os.environ["API_KEY"]` : `"none"`;
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${root}/v1", api_key=${key})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...parameters,
    ")",
    `print(answer.choices[0].${isChat ? (body.tools ? "message" : "message.content") : "text"})`,
  ].join("\n");
}

// JSON as Python writes it.
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (isNumber(value)) return write(value);
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, part]) => `${JSON.stringify(key)}: ${literal(part)}`).join(", ")}}`;
  return JSON.stringify(value);
}
