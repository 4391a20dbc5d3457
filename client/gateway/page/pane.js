// One of the two answers side by side: its figures, its text, its charts.

import { stream } from "./api.js";
import { clear, drawBars, drawLine } from "./charts.js";
import { Steps } from "./steps.js";

const SHOWN_STEPS = 60;
const DRAW_MS = 100;
const NEAR_END = 40; // pixels
const VALUES = ["tokens", "perStep", "perSecond", "perToken", "first", "accepted", "reason"];
const REASONS = { length: "max tokens", stop: "end of text, or a stop string", tool_calls: "calls of tools" };

export class Pane {
  constructor(root, template, legend) {
    this.root = root;
    this.legend = legend;
    root.append(template.content.cloneNode(true));
    this.output = root.querySelector(".output");
    this.copy = root.querySelector(".copy");
    this.charts = Object.fromEntries([...root.querySelectorAll("[data-chart]")].map((svg) => [svg.dataset.chart, svg]));
    // A part that opens, or a window that changes, has another width.
    root.querySelector(".more").addEventListener("toggle", () => this.steps && this.render());
    this.reset("");
  }

  set(name, text) {
    this.root.querySelector(`[data-value=${name}]`).textContent = text;
  }

  // Nothing of the last run stays. `label` says what the next one is.
  reset(label) {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.frame = this.timer = this.steps = this.answer = null;
    this.end = 0; // how far the answer could be scrolled when it was last followed
    this.root.classList.remove("done");
    this.root.classList.toggle("fresh", !label);
    this.root.querySelector(".run").textContent = label;
    for (const name of VALUES) this.set(name, "–");
    Object.values(this.charts).forEach(clear);
    this.copy.disabled = true;
  }

  // Streams into the answer; resolves to {perToken, reason}, or to {error}, which is null when it was stopped.
  async run(answer, request, key, signal) {
    this.steps = new Steps(performance.now());
    this.answer = answer;
    this.output.setAttribute("aria-busy", "true");
    let statistics = null, reason = null;
    try {
      for await (const { choices } of stream(request, key, signal)) {
        const [choice] = choices;
        statistics = choice.speculation ?? statistics;
        reason = choice.finish_reason ?? reason;
        this.steps.add(choice.token_sources, performance.now());
        this.legend.add(...choice.token_sources);
        answer.add(choice);
        this.frame ??= requestAnimationFrame(() => this.follow());
        this.timer ??= setTimeout(() => this.render(), DRAW_MS); // drawn anew as a whole, which takes longer than tokens do
      }
    } catch (error) {
      if (signal.aborted) this.set("reason", "you");
      return { error: signal.aborted ? null : error };
    } finally {
      this.follow();
      this.render();
      this.copy.disabled = answer.isEmpty;
      this.output.setAttribute("aria-busy", "false");
    }
    this.set("accepted", statistics ? `${statistics.accepted} of ${statistics.drafted}` : "–");
    this.set("reason", REASONS[reason] ?? reason ?? "–");
    this.root.classList.add("done");
    return { perToken: this.steps.perToken, reason };
  }

  // One line, for the conversation.
  get summary() {
    const { numTokens, perStep, perToken } = this.steps;
    return [`${numTokens} tokens`, `${perStep.toFixed(2)} a step`, ...(perToken > 0 ? [`${(1000 / perToken).toFixed(0)} a second`] : [])].join(", ");
  }

  // Keeps what comes in sight, unless its reader has gone back. At most once a frame: where the end is has to be laid out, which takes the longer the
  // more there is.
  follow() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { output } = this;
    if (this.end - output.scrollTop < NEAR_END) output.scrollTop = output.scrollHeight;
    this.end = output.scrollHeight - output.clientHeight;
  }

  render() {
    clearTimeout(this.timer);
    this.timer = null;
    const { steps } = this;
    if (!steps.numTokens) return;
    this.set("tokens", steps.numTokens);
    this.set("perStep", steps.perStep.toFixed(2));
    this.set("first", (steps.first - steps.started).toFixed(0));
    if (steps.perToken > 0) { // of one token there is no time between two
      this.set("perToken", steps.perToken.toFixed(1));
      this.set("perSecond", (1000 / steps.perToken).toFixed(0));
    }
    const lengths = steps.lengths.slice(-SHOWN_STEPS);
    drawBars(this.charts.steps, lengths, { first: steps.lengths.length - lengths.length + 1, kind: (length) => (length === 1 ? "target" : "") });
    const shares = Array.from(steps.accepted, (count) => (count ?? 0) / Math.max(1, steps.numSteps));
    drawBars(this.charts.positions, shares, { max: 1, label: "100%", everyName: true });
    const from = Math.max(0, steps.times.length - SHOWN_STEPS);
    drawLine(this.charts.times, steps.times.slice(from).map((_, i) => steps.recent(from + i + 1)), from + 1);
  }
}
