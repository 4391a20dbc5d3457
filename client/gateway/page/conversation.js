// A chat: what is sent again with each turn, and its messages on the page.

import { Answer, element } from "./answer.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result" };

export class Conversation {
  // onCopy: called with a button and the text that it stands for.
  constructor(root, onCopy) {
    this.root = root;
    this.onCopy = onCopy;
    this.turns = []; // {message, shown}, of answers {summary, parts} too
  }

  messages(system) {
    return [...(system ? [{ role: "system", content: system }] : []), ...this.turns.map((turn) => turn.message)];
  }

  // A call that waits for its result, if any: it comes before anything else.
  get openCall() {
    const asked = this.turns.findLastIndex((turn) => turn.message.role === "assistant");
    return this.turns[asked]?.message.tool_calls?.[this.turns.length - 1 - asked];
  }

  get isEmpty() {
    return !this.turns.length;
  }

  get canRetry() {
    return this.turns.at(-1)?.message.role === "assistant";
  }

  // What was typed: a message, or the result of the open call.
  say(text) {
    const call = this.openCall;
    this.add(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
  }

  add(message) {
    const shown = this.addElement(message.role, message.role === "tool" ? `Result of ${this.openCall.function.name}` : NAMES.user);
    shown.append(element("div", "text", message.content));
    this.turns.push({ message, shown });
  }

  // An answer that is about to come; then `keep` or `drop` it.
  open() {
    return new Answer(this.addElement("assistant", NAMES.assistant));
  }

  keep(answer, summary) {
    const copy = element("button", "copy", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => this.onCopy(copy, answer.whole));
    answer.root.append(element("p", "summary", copy, " ", summary));
    this.turns.push({ message: answer.message, shown: answer.root, summary, parts: answer.parts });
  }

  // What `restore` makes the same conversation of.
  toJSON() {
    return this.turns.map(({ message, summary, parts }) => ({ message, summary, parts }));
  }

  restore(turns) {
    for (const { message, summary, parts } of turns) {
      if (message.role !== "assistant") {
        this.add(message);
        continue;
      }
      const answer = this.open();
      answer.restore(message, parts);
      this.keep(answer, summary);
    }
  }

  // Takes the last turn away, and gives it, to be put back.
  take() {
    const turn = this.turns.pop();
    turn.shown.remove();
    return turn;
  }

  putBack(turn) {
    this.turns.push(turn);
    this.root.append(turn.shown);
  }

  clear() {
    this.turns = [];
    this.root.replaceChildren();
  }

  addElement(role, name) {
    const shown = element("article", `message ${role}`, element("h3", "", name));
    this.root.append(shown);
    return shown;
  }
}
