// The gateway: one streamed answer, what is served, whether it is there.

import { write } from "./exact.js";

// Where the gateway is: a proxy may have it below a prefix of its own (https://HOST/llm/).
export const ROOT = new URL("..", import.meta.url).href.replace(/\/$/, "");
const ask = (path, options) => fetch(ROOT + path, options);

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const authorize = (key) => (key ? { authorization: `Bearer ${key}` } : {});

// Yields the parsed events of an answer; throws an Error with the server's words. `signal` hangs up, which cancels the request on the server.
export async function* stream({ path, body }, key, signal) {
  const headers = { "content-type": "application/json", ...authorize(key) };
  const response = await ask(path, { method: "POST", headers, body: write({ ...body, stream: true }), signal });
  if (!response.ok) throw new Refusal(response.status, await readError(response));
  let held = "";
  for await (const text of readText(response.body)) {
    const events = (held + text).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
  throw new Error("the gateway closed the connection before the answer's end");
}

async function* readText(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function readError(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status} ${response.statusText}`;
  }
}

// What gRPC and Triton say of a server that is gone, or is starting again.
const LOST = /^(failed to connect|stream removed|socket closed|connection reset|connections? .* (closed|dropped)|recvmsg|stub process|request for unknown model)/i;

// An error in words for who sits before the page: request ids are for logs, and so are the words of connections.
export function explain(error) {
  if (error.status === 401) return "A valid API key is needed: enter it under Connection.";
  if (error instanceof TypeError) return "The gateway cannot be reached.";
  const message = error.message.replace(/^request '[^']*': /, "");
  return LOST.test(message) ? "The server was lost, or is still starting: try again in a moment." : message;
}

// What /v1/models says of the model; null to who has no key, undefined while nobody says anything.
export async function askModel(key) {
  try {
    const response = await ask("/v1/models", { headers: authorize(key) });
    if (response.ok) return (await response.json()).data[0];
    return response.status === 401 ? null : undefined;
  } catch {
    return undefined;
  }
}

export async function askHealth() {
  try {
    const response = await ask("/health");
    return response.ok ? { isGood: true, text: "The server is ready." } : { text: "The server is not there, or not ready." };
  } catch {
    return { text: "The gateway is not there." };
  }
}
