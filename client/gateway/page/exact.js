// Numbers that this language does not hold (beyond 2^53) stay as they were written: as marked strings, until they are written again.

const MARK = `number-${crypto.getRandomValues(new Uint32Array(4)).join("-")}:`; // nobody's text begins with it
const WRITTEN = new RegExp(`"${MARK}([^"]*)"`, "g");
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const STRINGS_AND_NUMBERS = /"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g;

const isHeld = (text) => Math.abs(Number(text)) <= Number.MAX_SAFE_INTEGER;

// A number as it was typed.
export const readNumber = (text) => (isHeld(text) ? Number(text) : MARK + text.replace(/^(-?)0+(?=\d)/, "$1"));

// As JSON.parse.
export const parse = (text) =>
  JSON.parse(text.replace(STRINGS_AND_NUMBERS, (part) => (!NUMBER.test(part) || isHeld(part) ? part : `"${MARK}${part}"`)));

// As JSON.stringify.
export const write = (value, indent) => JSON.stringify(value, null, indent)?.replace(WRITTEN, "$1");

export const isNumber = (value) => typeof value === "number" || (typeof value === "string" && value.startsWith(MARK));
