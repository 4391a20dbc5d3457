// What outlives a reload of the page, in this tab alone: the conversation, and what was typed beside it.

// The number: of the form that it has. The path: a proxy may have other gateways below other prefixes.
const KEY = `foretoken-conversation-1${new URL("..", import.meta.url).pathname.slice(0, -1)}`;
const MAX_CHARACTERS = 2_000_000;

// null: there is nothing, or the browser keeps nothing.
export function load() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY));
  } catch {
    return null;
  }
}

// Of one that is too long the colours go first, and what was thought. Whether it is kept; else nothing is, for a part would be taken for the whole.
export function keep(state) {
  const plain = { ...state, turns: state.turns.map(({ message, summary }) => ({ message, summary })) };
  for (const tried of [state, plain]) {
    const text = JSON.stringify(tried);
    if (text.length > MAX_CHARACTERS) continue;
    try {
      sessionStorage.setItem(KEY, text);
      return true;
    } catch { // as much as the browser keeps
    }
  }
  forget();
  return false;
}

export function forget() {
  try {
    sessionStorage.removeItem(KEY);
  } catch { // nothing was kept
  }
}
