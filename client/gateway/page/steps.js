// What the tokens of a stream say about its steps. A step ends with the one token that the target itself chose.

export class Steps {
  constructor(started) {
    this.started = started;
    this.first = 0;       // when the first token came
    this.last = 0;        // and the latest
    this.numTokens = 0;
    this.lengths = [];    // tokens of each finished step
    this.accepted = [];   // by position: steps whose draft there was accepted
    this.times = [];      // [tokens, milliseconds] of each arrival after the first
    this.open = 0;        // accepted drafts of the step whose last token is yet to come
  }

  add(sources, now) {
    if (!sources.length) return;
    if (this.numTokens) this.times.push([sources.length, now - this.last]);
    else this.first = now;
    this.last = now;
    this.numTokens += sources.length;
    for (const source of sources) {
      if (source !== "target") {
        this.accepted[this.open] = (this.accepted[this.open] ?? 0) + 1;
        this.open += 1;
      } else {
        this.lengths.push(this.open + 1);
        this.open = 0;
      }
    }
  }

  get numSteps() {
    return this.lengths.length + (this.open > 0);
  }

  get perStep() {
    return this.numTokens / Math.max(1, this.numSteps);
  }

  // Milliseconds a token, over the last `count` arrivals.
  recent(end, count = 8) {
    const part = this.times.slice(Math.max(0, end - count), end);
    return part.reduce((sum, [, ms]) => sum + ms, 0) / part.reduce((sum, [tokens]) => sum + tokens, 0);
  }

  get perToken() {
    return this.recent(this.times.length, this.times.length);
  }
}
