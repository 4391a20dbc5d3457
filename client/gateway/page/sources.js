// Who proposed a token, and in what colour that is shown.

const OWN = new Set(["target", "ngram", "suffix", "grammar", "prediction"]);

// A server has one drafter that is a model, whatever its method.
const classOf = (source) => (OWN.has(source) ? source : "model");

export function tokenElement(text, source) {
  const span = document.createElement("span");
  span.className = `token ${classOf(source)}`;
  span.title = source;
  span.textContent = text;
  return span;
}

// The colours of the sources that may come, and of any other that came.
export class Legend {
  constructor(root) {
    this.root = root;
    this.shown = new Set();
  }

  add(...sources) {
    for (const source of sources) {
      if (this.shown.has(source)) continue;
      this.shown.add(source);
      const entry = tokenElement(source, source);
      entry.title = "";
      this.root.append(entry, " ");
    }
  }

  replace(sources) {
    this.root.replaceChildren();
    this.shown.clear();
    this.add(...sources);
  }
}

// Lays tokens over text that comes in pieces of its own: stop strings are held back, and marks of calls and thoughts are left out.
export class Painter {
  constructor() {
    this.pending = []; // [text, source] of tokens that no text has come for
  }

  add(tokens, sources) {
    tokens.forEach((token, i) => this.pending.push([token, sources[i]]));
  }

  // The elements for a piece of text. Of a call the latest place is meant: its marks, which look alike, come before it.
  paint(text, isOfCall = false) {
    const known = this.pending.map(([token]) => token).join("");
    const place = isOfCall ? known.lastIndexOf(text) : known.indexOf(text);
    if (place < 0) return [tokenElement(text, this.pending[0]?.[1] ?? "target")];
    if (place) this.take(place);
    return this.take(text.length).map(([part, source]) => tokenElement(part, source));
  }

  // Removes so many characters; gives them, by token.
  take(count) {
    const taken = [];
    while (this.pending.length && (count || !this.pending[0][0])) {
      const [token, source] = this.pending[0];
      taken.push([token.slice(0, count), source]);
      if (token.length > count) this.pending[0][0] = token.slice(count);
      else this.pending.shift();
      count = Math.max(0, count - token.length);
    }
    return taken;
  }
}
