// Small SVG charts, drawn anew from their numbers.

const HEIGHT = 80, LEFT = 30, BOTTOM = 14;

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const write = (value) => (Number.isInteger(value) || value >= 100 ? value.toFixed(0) : value.toPrecision(2));

// The frame: the axis, the largest value and the ends of the axis. Returns functions from values to places, in pixels.
function frame(svg, max, label, ends) {
  const right = svg.clientWidth || 200; // in a closed part nothing has a width
  svg.setAttribute("viewBox", `0 0 ${right} ${HEIGHT}`);
  svg.replaceChildren(
    element("line", { class: "axis", x1: LEFT, x2: right, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    element("text", { x: 0, y: 10 }, label),
    ...ends.map((end, i) => element("text", { x: i ? right : LEFT, y: HEIGHT - 2, "text-anchor": i ? "end" : "start" }, end)),
  );
  const height = HEIGHT - BOTTOM - 4;
  return { width: right - LEFT, y: (value) => HEIGHT - BOTTOM - (height * value) / max, height: (value) => (height * value) / max };
}

// An axis with nothing on it.
export function clear(svg) {
  frame(svg, 1, "", []);
  svg.setAttribute("aria-label", "nothing yet");
}

// first: the number of the first bar; max: the value of a full one; everyName: each bar has its number below it.
export function drawBars(svg, values, { max = Math.max(1, ...values), label = write(max), first = 1, everyName = false, kind = () => "" } = {}) {
  const last = first + values.length - 1;
  const place = frame(svg, max, label, everyName || !values.length ? [] : [first, ...(last > first ? [last] : [])]);
  const width = place.width / Math.max(values.length, 6);
  values.forEach((value, i) => {
    const x = LEFT + i * width;
    svg.append(element("rect", { class: `bar ${kind(value)}`, x: x + width * 0.1, width: width * 0.8, y: place.y(value), height: place.height(value) }));
    if (everyName) svg.append(element("text", { x: x + width / 2, y: HEIGHT - 2, "text-anchor": "middle" }, first + i));
  });
  const shown = label.endsWith("%") ? (value) => `${Math.round(100 * value)}%` : write;
  svg.setAttribute("aria-label", values.length ? `${first} to ${last}: ${values.map(shown).join(", ")}` : "none");
}

export function drawLine(svg, values, first = 1) {
  if (!values.length) return clear(svg);
  const max = Math.max(...values, 0.001), last = first + values.length - 1;
  const place = frame(svg, max, write(max), [first, ...(last > first ? [last] : [])]);
  const step = place.width / Math.max(values.length - 1, 1);
  svg.append(element("polyline", { class: "line", points: values.map((v, i) => `${LEFT + i * step},${place.y(v)}`).join(" ") }));
  svg.setAttribute("aria-label", `at most ${write(max)}, at last ${write(values.at(-1))}`);
}
