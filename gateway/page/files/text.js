// Texts of tokens: assigns a stream's characters to tokens, and formats values.

const UNREADABLE = "\ufffd";
const MARKS = new Map([[" ", "␣"], ["\n", "⏎"], ["\t", "⇥"], ["\r", "␍"]]);
const MOST_SHOWN = 14;

/** A token's text with its white space visible, cut to fit a box. */
export function shown(text) {
  if (text === "") return "(empty)";
  const visible = [...text].map((character) => MARKS.get(character) ?? character);
  return visible.length > MOST_SHOWN ? [...visible.slice(0, MOST_SHOWN - 1), "…"].join("") : visible.join("");
}

/** A log-probability as a percentage. */
export function percent(logprob) {
  return share(Math.exp(logprob));
}

/** A share of 1 as a percentage. */
export function share(value) {
  const whole = value * 100;
  if (whole > 0 && whole < 0.1) return "<0.1 %";
  return `${whole >= 10 || whole === 0 ? Math.round(whole) : whole.toFixed(1)} %`;
}

/** A duration in milliseconds, or in seconds from 10 s on. */
export function duration(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

/** A number with what it counts. */
export function counted(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

/**
 * Assigns the characters of a stream to its tokens. Text may lag behind tokens (stop strings, half characters), and a
 * token may have none (special tokens): the text is always shown as it came, even if the tokens' own texts differ.
 */
export class Aligner {
  #waiting = [];

  /** Adds tokens, each `{index, text}`, whose text is still to come. */
  add(tokens) {
    for (const { index, text } of tokens) this.#waiting.push({ index, rest: text });
  }

  /** Adds text. Returns `{text, index}` pieces that form it; `index` is their token's. */
  push(text) {
    const pieces = [];
    let rest = text;
    while (rest) {
      const first = this.#waiting[0];
      if (!first) {
        pieces.push({ text: rest, index: null });
        return pieces;
      }
      if (first.rest && rest.startsWith(first.rest)) {
        pieces.push({ text: first.rest, index: first.index });
        rest = rest.slice(first.rest.length);
        this.#waiting.shift();
      } else if (first.rest.startsWith(rest)) {
        pieces.push({ text: rest, index: first.index });
        first.rest = first.rest.slice(rest.length);
        return pieces;
      } else {
        const [next, at] = this.#found(rest);
        const until = next < 0 ? rest.length : at;
        if (until) pieces.push({ text: rest.slice(0, until), index: first.index });
        rest = rest.slice(until);
        this.#waiting.splice(0, next < 0 ? this.#waiting.length : next);
      }
    }
    return pieces;
  }

  /** The first later token whose text is in the rest, and its place; [-1, 0] if there is none. */
  #found(rest) {
    for (let next = 1; next < this.#waiting.length; next += 1) {
      const own = this.#waiting[next].rest;
      const at = own && !own.includes(UNREADABLE) ? rest.indexOf(own) : -1;
      if (at >= 0) return [next, at];
    }
    return [-1, 0];
  }
}
