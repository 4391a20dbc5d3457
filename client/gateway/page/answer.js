// One answer as it is shown: its text in the colours of its tokens, what was thought before it, and the calls that it makes.

import { Painter, tokenElement } from "./sources.js";

export function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export class Answer {
  constructor(root) {
    this.root = root;
    this.painter = new Painter();
    this.text = "";
    this.calls = []; // as messages have them
    this.shown = { calls: [] };
  }

  // A choice of the stream: of a chat, or of a completion.
  add(choice) {
    this.painter.add(choice.tokens ?? [], choice.token_sources ?? []);
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) {
      this.shown.thought ??= this.addThought();
      this.shown.thought.append(...this.painter.paint(delta.reasoning_content));
    }
    if (delta.content) {
      this.text += delta.content;
      this.shown.text ??= this.addText();
      this.shown.text.append(...this.painter.paint(delta.content));
    }
    for (const call of delta.tool_calls ?? []) this.addCall(call);
  }

  // As `message` and `parts` of another one had it, or without who proposed what.
  restore({ content, tool_calls: calls = [] }, parts = {}) {
    const paint = (pieces, text) => (pieces ? pieces.map(([piece, source]) => tokenElement(piece, source)) : [text]);
    if (parts.thought) (this.shown.thought = this.addThought()).append(...paint(parts.thought));
    this.text = content ?? "";
    if (this.text) (this.shown.text = this.addText()).append(...paint(parts.text, this.text));
    calls.forEach((call, index) => {
      this.addCall({ index, ...call, function: { name: call.function.name } });
      this.calls[index].function.arguments = call.function.arguments;
      this.shown.calls[index].append(...paint(parts.calls?.[index], call.function.arguments));
    });
  }

  // Who proposed what, as it is shown.
  get parts() {
    const read = (shown) => Array.from(shown.querySelectorAll(".token"), (token) => [token.textContent, token.title]);
    const { thought, text, calls } = this.shown;
    return { ...(thought && { thought: read(thought) }), ...(text && { text: read(text) }), calls: calls.map(read) };
  }

  addText() {
    return this.root.appendChild(element("div", "text"));
  }

  addThought() {
    const text = element("div", "text");
    this.root.append(element("details", "thought", element("summary", "", "What it thought first"), text));
    return text;
  }

  addCall({ index, id, function: { name, arguments: more } }) {
    if (!this.calls[index]) {
      this.calls[index] = { id, type: "function", function: { name, arguments: "" } };
      this.shown.calls[index] = element("div", "text");
      this.root.append(element("div", "call", element("p", "", "calls ", element("strong", "", name)), this.shown.calls[index]));
    }
    if (!more) return;
    this.calls[index].function.arguments += more;
    this.shown.calls[index].append(...this.painter.paint(more, true));
  }

  get isEmpty() {
    return !this.text && !this.calls.length;
  }

  // What is copied, and compared with the other answer.
  get whole() {
    const calls = this.calls.map((call) => `${call.function.name}(${call.function.arguments})`);
    return [this.text, ...calls].filter(Boolean).join("\n");
  }

  get message() {
    return { role: "assistant", content: this.calls.length && !this.text ? null : this.text, ...(this.calls.length && { tool_calls: this.calls }) };
  }
}
