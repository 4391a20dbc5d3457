// The page: a prompt or a chat, with speculation and without, side by side on the same seed.

import { Answer } from "./answer.js";
import { ROOT, askHealth, askModel, explain } from "./api.js";
import { Conversation } from "./conversation.js";
import { copyText } from "./copy.js";
import { forget, keep, load } from "./kept.js";
import { Pane } from "./pane.js";
import { checkSettings, describe, offer, readSettings } from "./settings.js";
import { asCurl, asPython } from "./snippets.js";
import { Legend } from "./sources.js";

const HEALTH_MS = 10_000;
const EXAMPLE = `class Circle:
    """A circle of a radius."""

    def __init__(self, x, y, radius):
        self.x = x
        self.y = y
        self.radius = radius

    def __repr__(self):
        return f"Circle(x={self.x!r}, y={self.y!r}, radius={self.radius!r})"


class Rectangle:
    """A rectangle of a width and a height."""

    def __init__(self, x, y, width, height):`;
const EXAMPLE_TOKENS = 160;
const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "colour": {"enum": ["red", "green", "blue"]},
    "is_large": {"type": "boolean"}
  },
  "required": ["colour", "is_large"],
  "additionalProperties": false
}`;

const at = (id) => document.getElementById(id);
const main = document.querySelector("main"), form = at("form"), prompt = at("prompt"), verdict = at("verdict");
const isPhone = matchMedia("(max-width: 44rem)");
const legend = new Legend(at("sources"));
const panes = { on: new Pane(at("on"), at("pane"), legend), off: new Pane(at("off"), at("pane"), legend) };
const conversation = new Conversation(panes.on.output, copy);
let model = {};
let isModelTold = false; // or that it is told to those who have a key
let mode = "completion";
let isChosen = false; // the mode, by who uses the page
let hangUp = null; // an AbortController while something runs
const typed = { chat: { text: "", tokens: "" }, completion: { text: EXAMPLE, tokens: EXAMPLE_TOKENS } };

// -- what is sent --------------------------------------------------------------------------------------------------------------

function makeRequest(text) {
  const settings = { ...(model.id && { model: model.id }), ...readSettings(mode) };
  if (mode === "completion") return { path: "/v1/completions", body: { ...settings, prompt: text } };
  const call = conversation.openCall;
  const next = call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
  const messages = [...conversation.messages(at("system").value), ...(text ? [next] : [])];
  return { path: "/v1/chat/completions", body: { ...settings, messages } };
}

function showSnippet() {
  if (!at("code").open) return;
  const write = at("language").value === "curl" ? asCurl : asPython;
  at("snippet").textContent = write(makeRequest(prompt.value), ROOT, Boolean(at("key").value));
}

// -- a run -----------------------------------------------------------------------------------------------------------------------

// Both answers to one request. Resolves to their outcomes, with the answers themselves.
async function answerBoth(request) {
  const seed = request.body.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1; // both draw from the same
  const body = { ...request.body, seed, return_tokens: true };
  const { messages, prompt: _, return_tokens: __, ...settings } = body;
  const plain = { num_speculative_tokens: 0 };
  panes.on.reset(describe(settings));
  panes.off.reset(at("compare").checked ? describe({ ...settings, speculative: plain }) : "");
  panes.off.output.replaceChildren();
  if (mode === "completion") panes.on.output.replaceChildren();
  const answers = { on: messages ? conversation.open() : new Answer(panes.on.output), off: new Answer(panes.off.output) };
  panes.on.output.scrollTop = panes.on.output.scrollHeight;
  const { signal } = hangUp, key = at("key").value;
  const runs = [panes.on.run(answers.on, { ...request, body }, key, signal)];
  if (at("compare").checked) runs.push(panes.off.run(answers.off, { ...request, body: { ...body, speculative: plain } }, key, signal));
  const [on, off] = await Promise.all(runs);
  return { on: { ...on, answer: answers.on }, off: off && { ...off, answer: answers.off } };
}

function setRunning(isRunning) {
  at("run").disabled = isRunning;
  at("stop").disabled = !isRunning;
  showTurn();
}

// What may be done next in the chat.
function showTurn() {
  const call = mode === "chat" ? conversation.openCall : undefined;
  at("prompt-label").textContent = mode === "completion" ? "Prompt" : call ? `Result of ${call.function.name}` : "Message";
  at("retry").disabled = Boolean(hangUp) || !conversation.canRetry;
  at("clear").disabled = Boolean(hangUp) || conversation.isEmpty;
  for (const choice of form.elements.mode) choice.disabled = Boolean(hangUp) || (choice.value === "chat" && !model.has_chat_template);
  showSnippet();
}

async function run(request) {
  hangUp = new AbortController();
  at("error").textContent = "";
  verdict.textContent = at("compare").checked ? "both run at once, in one batch" : "it runs";
  setRunning(true);
  if (isPhone.matches) at("answers").scrollIntoView();
  const outcome = await answerBoth(request);
  verdict.textContent = hangUp.signal.aborted ? "stopped" : judge(outcome);
  showErrors(outcome);
  hangUp = null;
  return outcome.on;
}

function judge({ on, off }) {
  if (on.error || off?.error) return "";
  if (!off) return `done: ${panes.on.summary}`;
  const same = on.answer.whole === off.answer.whole ? "same text" : "texts differ";
  const ratio = off.perToken / on.perToken; // of one token there is no time between two
  return Number.isFinite(ratio) ? `${same}, ${ratio.toFixed(2)} times as fast` : same;
}

// Each thing that went wrong once, though it went wrong for both.
function showErrors({ on, off }) {
  const errors = [on.error && `With speculation: ${explain(on.error)}`, off?.error && `Plain decoding: ${explain(off.error)}`].filter(Boolean);
  const isShared = !off || (on.error && off.error && explain(on.error) === explain(off.error));
  at("error").textContent = isShared && on.error ? explain(on.error) : errors.join(" ");
  if ([on, off].some((outcome) => outcome?.error?.status === 401)) {
    at("connection").open = true;
    at("key").focus();
  }
}

async function complete() {
  await run(makeRequest(prompt.value));
  setRunning(false);
}

// A turn. What got no answer goes back to where it was typed, so that the conversation is always one of questions and answers.
async function say() {
  const text = prompt.value;
  save(text);
  conversation.say(text);
  prompt.value = "";
  if (conversation.openCall) { // of several calls each has its result
    save();
    return showTurn();
  }
  const isKept = await turn();
  if (!isKept) {
    conversation.take();
    prompt.value ||= text;
  }
  save(isKept ? "" : text);
  setRunning(false);
  if (!isPhone.matches) prompt.focus(); // there the answer would be scrolled away
}

async function retry() {
  const last = conversation.take();
  if (!(await turn())) conversation.putBack(last);
  save();
  setRunning(false);
}

async function turn() {
  const { answer, error } = await run(makeRequest(""));
  const isKept = error === undefined || (error === null && !answer.isEmpty);
  if (isKept) conversation.keep(answer, panes.on.summary + (error === null ? ", stopped" : ""));
  else answer.root.remove();
  return isKept;
}

// For a reload of the page. unanswered: what was said last.
function save(unanswered = "") {
  const isKept = keep({ mode, system: at("system").value, tools: at("tools").value, unanswered, turns: conversation.toJSON() });
  if (!isKept && !conversation.isEmpty) at("mode-note").textContent = "This conversation is too long to outlive a reload of the page.";
}

// What was there before a reload.
function restore() {
  const kept = load();
  if (!kept) return;
  try {
    conversation.restore(kept.turns);
    at("system").value = kept.system;
    at("tools").value = kept.tools;
    typed.chat.text = kept.unanswered;
    isChosen = true;
    panes.on.output.replaceChildren(); // it stands there in its own mode
    setMode(kept.mode);
  } catch (error) {
    console.warn("the conversation cannot be read", error);
    conversation.clear();
    forget();
  }
}

async function start(event) {
  event?.preventDefault();
  if (hangUp || !checkSettings(mode)) return;
  await (mode === "chat" ? say() : complete());
}

// -- what is shown ---------------------------------------------------------------------------------------------------------------

// Where answers stand in the page is where they are read: on phones, and in chats, before what is typed.
function arrange() {
  const isFirst = mode === "chat" || isPhone.matches;
  const answers = at("answers");
  if (isFirst !== (main.firstElementChild === answers)) main[isFirst ? "prepend" : "append"](answers);
}

function setMode(next) {
  if (next !== mode) {
    typed[mode] = { text: prompt.value, tokens: form.elements.max_tokens.value };
    mode = next;
    prompt.value = typed[mode].text;
    form.elements.max_tokens.value = typed[mode].tokens;
    for (const pane of Object.values(panes)) {
      pane.reset("");
      pane.output.replaceChildren();
    }
    if (mode === "chat") conversation.turns.forEach((kept) => panes.on.output.append(kept.shown));
    verdict.textContent = at("error").textContent = "";
  }
  main.dataset.mode = form.elements.mode.value = mode;
  const isChat = mode === "chat";
  at("on-title").textContent = isChat ? "Conversation" : at("compare").checked ? "With speculation" : "Answer";
  at("run").firstElementChild.textContent = isChat ? "Send" : "Run";
  at("run").querySelector("kbd").textContent = isChat ? "↵" : "Ctrl ↵";
  prompt.rows = isChat ? 3 : 9;
  at("off").hidden = !at("compare").checked;
  arrange();
  showTurn();
}

// What is served: its name, whether it converses, and the methods that requests may choose.
async function showModel() {
  const found = await askModel(at("key").value);
  isModelTold = found !== undefined;
  if (!found) return;
  model = found;
  at("model").textContent = model.max_model_len ? `Model ${model.id}, ${model.max_model_len} tokens of context.` : `Model ${model.id}.`;
  if (model.methods) legend.replace(["target", ...offer(model), "grammar"]);
  const note = model.is_bundled ? "This is the bundled model: it completes code and does not converse." : "";
  at("mode-note").textContent = model.has_chat_template === false ? "This model has no chat template, so there is no chat." : note;
  const first = model.has_chat_template && !model.is_bundled ? "chat" : "completion";
  if (!hangUp) setMode(!isChosen ? first : model.has_chat_template ? mode : "completion");
}

async function showHealth() {
  const { isGood, text } = await askHealth();
  const wasGood = at("health").className === "good";
  at("health").textContent = text;
  at("health").className = isGood ? "good" : "bad";
  if (isGood && !(wasGood && isModelTold)) showModel(); // it may be another one
}

async function copy(button, text) {
  verdict.textContent = (await copyText(text)) ? "copied" : "this browser lets no page copy here: select the text";
  button.focus();
}

prompt.value = EXAMPLE;
at("schema").value = EXAMPLE_SCHEMA;
form.elements.max_tokens.value = EXAMPLE_TOKENS;
for (const details of document.querySelectorAll(".more")) details.open = !isPhone.matches;
form.addEventListener("submit", start);
form.addEventListener("input", () => {
  readSettings(mode);
  showSnippet();
});
for (const choice of form.elements.mode) {
  choice.addEventListener("change", () => {
    isChosen = true;
    setMode(choice.value);
    save();
  });
}
at("compare").addEventListener("change", () => setMode(mode));
at("stop").addEventListener("click", () => hangUp?.abort());
at("retry").addEventListener("click", () => checkRetry());
at("clear").addEventListener("click", () => {
  conversation.clear();
  panes.on.reset("");
  panes.off.reset("");
  panes.off.output.replaceChildren();
  verdict.textContent = at("error").textContent = "";
  save();
  showTurn();
  prompt.focus();
});
for (const id of ["system", "tools"]) at(id).addEventListener("change", () => hangUp || save());
at("copy-code").addEventListener("click", () => copy(at("copy-code"), at("snippet").textContent));
for (const pane of Object.values(panes)) pane.copy.addEventListener("click", () => copy(pane.copy, pane.answer.whole));
at("code").addEventListener("toggle", showSnippet);
at("key").addEventListener("change", showModel);
isPhone.addEventListener("change", arrange);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hangUp?.abort();
  if (event.key !== "Enter" || event.isComposing) return;
  const isSent = event.ctrlKey || event.metaKey || (mode === "chat" && event.target === prompt && !event.shiftKey);
  if (isSent) start(event);
});
setMode(mode);
restore();
showHealth();
setInterval(showHealth, HEALTH_MS);

function checkRetry() {
  prompt.required = false; // nothing has to be typed
  const isGood = checkSettings(mode);
  prompt.required = true;
  if (!hangUp && isGood) retry();
}
