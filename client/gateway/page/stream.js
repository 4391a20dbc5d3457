// One streamed completion over OpenAI's interface.

// Yields the parsed events; throws an Error with the server's words. `signal` hangs up, which cancels the request on the server.
export async function* stream(body, key, signal) {
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch("/v1/completions", { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }), signal });
  if (!response.ok) throw new Error(await readError(response));
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
