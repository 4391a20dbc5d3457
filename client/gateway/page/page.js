// The page: one prompt, with speculation and without, side by side on the same seed.

import { drawBars, drawLine } from "./charts.js";
import { Steps } from "./steps.js";
import { stream } from "./stream.js";

const SHOWN_STEPS = 60;
const VALUES = ["tokens", "perStep", "perSecond", "perToken", "first", "accepted", "reason"];
const REASONS = { length: "the limit of tokens", stop: "the model's own end" };
const SOURCES = new Set(["target", "mtp", "ngram", "suffix"]);
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

const at = (id) => document.getElementById(id);
const form = at("form"), run = at("run"), stop = at("stop"), verdict = at("verdict");
let hangUp = null; // an AbortController while something runs

class Pane {
  constructor(id) {
    this.root = at(id);
    this.root.append(at("pane").content.cloneNode(true));
    this.output = this.root.querySelector(".output");
    this.error = this.root.querySelector(".error");
  }

  set(name, text) {
    this.root.querySelector(`[data-value=${name}]`).textContent = text;
  }

  chart(name) {
    return this.root.querySelector(`[data-chart=${name}]`);
  }

  // Streams one completion; resolves to {text, perToken}, or to null when it failed or was stopped.
  async run(body, key, signal) {
    this.output.replaceChildren();
    this.error.hidden = true;
    this.root.classList.remove("done");
    for (const name of VALUES) this.set(name, "–");
    for (const name of ["steps", "positions", "times"]) this.chart(name).replaceChildren();
    this.steps = new Steps(performance.now());
    let text = "", statistics = null, reason = null;
    try {
      for await (const { choices } of stream(body, key, signal)) {
        const [choice] = choices;
        text += choice.text;
        statistics = choice.speculation ?? statistics;
        reason = choice.finish_reason ?? reason;
        this.steps.add(choice.token_sources, performance.now());
        this.append(choice.tokens, choice.token_sources);
        this.draw();
      }
    } catch (error) {
      if (signal.aborted) {
        this.set("accepted", "stopped");
      } else {
        this.error.textContent = error.message;
        this.error.hidden = false;
      }
      return null;
    }
    this.render();
    this.set("accepted", statistics ? `${statistics.accepted} of ${statistics.drafted}` : "–");
    this.set("reason", REASONS[reason] ?? reason ?? "–");
    this.root.classList.add("done");
    return { text, perToken: this.steps.perToken };
  }

  append(tokens, sources) {
    const isAtEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 40;
    tokens.forEach((token, i) => {
      const span = document.createElement("span");
      span.className = `token ${SOURCES.has(sources[i]) ? sources[i] : "target"}`;
      span.title = sources[i];
      span.textContent = token;
      this.output.append(span);
    });
    if (isAtEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  // At most once a frame, however fast the tokens come.
  draw() {
    this.frame ??= requestAnimationFrame(() => this.render());
  }

  render() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { steps } = this;
    this.set("tokens", steps.numTokens);
    this.set("perStep", steps.perStep.toFixed(2));
    if (steps.times.length) {
      this.set("perToken", steps.perToken.toFixed(1));
      this.set("perSecond", (1000 / steps.perToken).toFixed(0));
    }
    if (steps.numTokens) this.set("first", (steps.first - steps.started).toFixed(0));
    const lengths = steps.lengths.slice(-SHOWN_STEPS);
    drawBars(this.chart("steps"), lengths, { kind: (length) => (length === 1 ? "target" : "") });
    const shares = Array.from(steps.accepted, (count) => (count ?? 0) / Math.max(1, steps.numSteps));
    drawBars(this.chart("positions"), shares, { max: 1, label: "100%", names: shares.map((_, i) => i + 1) });
    const from = Math.max(0, steps.times.length - SHOWN_STEPS);
    drawLine(this.chart("times"), steps.times.slice(from).map((_, i) => steps.recent(from + i + 1)));
  }
}

const panes = { on: new Pane("on"), off: new Pane("off") };

function readForm() {
  const speculative = {};
  if (at("method").value) speculative.method = at("method").value;
  if (at("drafts").value) speculative.num_speculative_tokens = Number(at("drafts").value);
  const shared = {
    prompt: at("prompt").value,
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    return_tokens: true,
  };
  return { on: Object.keys(speculative).length ? { ...shared, speculative } : shared, off: { ...shared, speculative: { num_speculative_tokens: 0 } } };
}

async function start(event) {
  event?.preventDefault();
  if (hangUp || !form.reportValidity()) return;
  hangUp = new AbortController();
  run.disabled = true;
  stop.disabled = false;
  verdict.textContent = "both run at once, in one batch";
  const bodies = readForm(), key = at("key").value;
  const [on, off] = await Promise.all([panes.on.run(bodies.on, key, hangUp.signal), panes.off.run(bodies.off, key, hangUp.signal)]);
  verdict.textContent = hangUp.signal.aborted ? "stopped" : "";
  if (on && off) {
    const same = on.text === off.text ? "same text" : "texts differ";
    const ratio = off.perToken / on.perToken; // of one token there is no time between two
    verdict.textContent = Number.isFinite(ratio) ? `${same}, ${ratio.toFixed(2)} times as fast` : same;
  }
  hangUp = null;
  run.disabled = false;
  stop.disabled = true;
}

// What is served: its name, and the methods that requests may choose.
async function showModel(key) {
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch("/v1/models", { headers });
    const [model] = response.ok ? (await response.json()).data : [];
    if (!model) return;
    at("model").textContent = model.max_model_len ? `Model ${model.id}, ${model.max_model_len} tokens of context.` : `Model ${model.id}.`;
    if (!model.methods) return;
    const chosen = at("method").value;
    const drafting = model.methods.filter((method) => method !== "none" && method !== "naive");
    at("method").replaceChildren(new Option("default", ""), ...drafting.map((method) => new Option(method, method)));
    at("method").value = drafting.includes(chosen) ? chosen : "";
  } catch {
    // The line below says that the gateway is not there.
  }
}

async function showHealth() {
  const shown = at("health");
  try {
    const response = await fetch("/health");
    shown.textContent = response.ok ? "The server is ready." : `The server is not there: ${(await response.json()).error}`;
    shown.className = response.ok ? "good" : "bad";
  } catch {
    shown.textContent = "The gateway is not there.";
    shown.className = "bad";
  }
}

at("prompt").value = EXAMPLE;
form.addEventListener("submit", start);
stop.addEventListener("click", () => hangUp?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hangUp?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start(event);
});
at("key").addEventListener("change", () => showModel(at("key").value));
showModel("");
showHealth();
setInterval(showHealth, 10_000);
