// One request and its answer: tokens, rounds, figures.

import { events } from "./stream.js";
import { Aligner } from "./text.js";

/** A streamed answer. `onChange(run, pieces)` is called with the new text after each event and at the end. */
export class Run {
  /** Tokens, each `{id, text, origin, logprob}`. */
  tokens = [];
  /** Rounds, each `{start, num, step}`; `step` is null if the server does not report it. */
  rounds = [];
  text = "";
  ending = "";
  fingerprint = "";
  metrics = null;
  isRunning = false;
  /** Milliseconds from the start to the first token. */
  firstMs = 0;
  lastMs = 0;
  #numFirst = 0;
  #covered = 0;
  #aligner = new Aligner();
  #began = 0;

  constructor(name, isSpeculating) {
    this.name = name;
    this.isSpeculating = isSpeculating;
  }

  /** Runs to the end. Throws Failure, or AbortError once `signal` fires; the tokens so far are kept. */
  async run(request, key, signal, onChange) {
    this.isRunning = true;
    this.#began = performance.now();
    const body = { ...request.body, speculation: { ...request.body.speculation, enabled: this.isSpeculating } };
    try {
      for await (const event of events(request.path, body, key, signal)) {
        const pieces = this.#take(event);
        onChange(this, pieces);
      }
    } finally {
      this.isRunning = false;
      onChange(this, []);
    }
  }

  /** Tokens per second after the first, by the server's clock if it reports steps; null while unknown. */
  get speed() {
    const timed = this.rounds.filter((round) => round.step);
    if (timed.length > 1 && timed.length === this.rounds.length) {
      const ms = timed.at(-1).step.at_ms - timed[0].step.at_ms;
      return ms > 0 ? ((this.#covered - timed[0].num) * 1000) / ms : null;
    }
    const ms = this.lastMs - this.firstMs;
    return ms > 0 ? ((this.tokens.length - this.#numFirst) * 1000) / ms : null;
  }

  /** Verified draft tokens as `{accepted, drafted}`; null if steps are not reported. */
  get acceptance() {
    const nodes = this.rounds.flatMap((round) => round.step?.nodes ?? []).filter((node) => node.state !== "unverified");
    if (!nodes.length) return null;
    return { accepted: nodes.filter((node) => node.state === "accepted").length, drafted: nodes.length };
  }

  /** Index of a token's round; -1 if unknown. */
  roundOf(index) {
    return this.rounds.findIndex((round) => index >= round.start && index < round.start + round.num);
  }

  #take(event) {
    this.fingerprint = event.system_fingerprint || this.fingerprint;
    if (event.metrics) this.metrics = event.metrics.speculative_decoding;
    const pieces = [];
    for (const choice of event.choices) {
      this.#takeTokens(choice);
      this.#takeRounds(choice.steps ?? []);
      const thought = choice.delta?.reasoning_content ?? "";
      const text = choice.text ?? choice.delta?.content ?? "";
      if (thought) pieces.push(...this.#aligner.push(thought).map((piece) => ({ ...piece, isThought: true })));
      if (text) pieces.push(...this.#aligner.push(text));
      this.text += text;
      if (choice.finish_reason) this.ending = endingOf(choice);
    }
    return pieces;
  }

  #takeTokens(choice) {
    const told = choice.token_origins ?? [];
    if (!told.length) return;
    const now = performance.now() - this.#began;
    if (!this.tokens.length) {
      this.firstMs = now;
      this.#numFirst = told.length;
    }
    this.lastMs = now;
    const logprobs = choice.logprobs?.token_logprobs ?? choice.logprobs?.content?.map((entry) => entry.logprob) ?? [];
    const start = this.tokens.length;
    told.forEach((token, number) => this.tokens.push({ ...token, logprob: logprobs[number] ?? null }));
    this.#aligner.add(told.map((token, number) => ({ index: start + number, text: token.text })));
  }

  #takeRounds(steps) {
    for (const step of steps) {
      if (!step.num_tokens) continue;
      this.rounds = this.rounds.filter((round) => round.start < step.start);
      this.rounds.push({ start: step.start, num: step.num_tokens, step });
      this.#covered = step.start + step.num_tokens;
    }
    // Without reported steps, a round ends with the target's own token.
    for (let index = this.#covered; index < this.tokens.length; index += 1) {
      const last = this.rounds.at(-1);
      const isNew = !last || last.step || this.tokens[index - 1].origin !== "draft";
      if (isNew) this.rounds.push({ start: index, num: 1, step: null });
      else last.num += 1;
      this.#covered = index + 1;
    }
  }
}

function endingOf(choice) {
  switch (choice.finish_reason) {
    case "length":
      return "Ended at the token limit.";
    case "stop":
      return typeof choice.stop_reason === "string"
        ? `Ended at the stop string ${JSON.stringify(choice.stop_reason)}.`
        : "Ended at the model's end token.";
    case "abort":
      return "The server ended it early.";
    default:
      return `Ended: ${choice.finish_reason}.`;
  }
}

/** Compares two runs: `{kind: "equal" | "part" | "differs", text}`. */
export function compared(fast, plain, isWhole) {
  const num = Math.min(fast.tokens.length, plain.tokens.length);
  let same = 0;
  while (same < num && fast.tokens[same].id === plain.tokens[same].id) same += 1;
  const areEqual = same === num && (!isWhole || fast.tokens.length === plain.tokens.length) && sameText(fast, plain, isWhole);
  if (!areEqual) {
    const why =
      fast.fingerprint !== plain.fingerprint
        ? " Two targets with different numerics answered."
        : " The target's numerics depend on the batch, or the target was replaced between the runs.";
    return { kind: "differs", text: `The outputs differ from token ${same + 1} on.${why}` };
  }
  if (!isWhole) return { kind: "part", text: `Stopped. The first ${same} token ids of both are equal.` };
  return { kind: "equal", text: `Equal: all ${same} token ids agree.` };
}

function sameText(fast, plain, isWhole) {
  return isWhole ? fast.text === plain.text : true;
}
