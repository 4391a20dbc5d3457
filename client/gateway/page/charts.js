// Small SVG charts, drawn anew from their numbers.

const HEIGHT = 80, LEFT = 30, BOTTOM = 12;

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The frame: axis and largest value. Returns its width and functions from values to places, in pixels.
function frame(svg, max, label) {
  const right = svg.clientWidth;
  svg.replaceChildren(
    element("line", { class: "axis", x1: LEFT, x2: right, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    element("text", { x: 0, y: 9 }, label),
  );
  const height = HEIGHT - BOTTOM - 4;
  return { width: right - LEFT, y: (value) => HEIGHT - BOTTOM - (height * value) / max, height: (value) => (height * value) / max };
}

export function drawBars(svg, values, { max = Math.max(1, ...values), label = String(max), names = [], kind = () => "" } = {}) {
  const place = frame(svg, max, label);
  const width = place.width / Math.max(values.length, 6);
  values.forEach((value, i) => {
    const x = LEFT + i * width;
    svg.append(element("rect", { class: `bar ${kind(value)}`, x: x + width * 0.1, width: width * 0.8, y: place.y(value), height: place.height(value) }));
    if (names[i]) svg.append(element("text", { x: x + width / 2, y: HEIGHT - 2, "text-anchor": "middle" }, names[i]));
  });
}

export function drawLine(svg, values) {
  const max = Math.max(...values, 0.001);
  const place = frame(svg, max, max.toPrecision(2));
  const step = place.width / Math.max(values.length - 1, 1);
  if (values.length) svg.append(element("polyline", { class: "line", points: values.map((v, i) => `${LEFT + i * step},${place.y(v)}`).join(" ") }));
}
