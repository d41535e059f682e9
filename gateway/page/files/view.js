// A run on the page: its figures, text, rounds as bars, and the selected round.

import { acceptedIn, element, isFromModel, roundDetails, roundSentence } from "./tree.js";
import { duration, share } from "./text.js";

const MOST_REFUSED = 12;
const HINT = "Point at a token or a bar to see its round. Arrow keys move between bars.";
let numViews = 0;

/** The CSS class of a token's origin. */
function kindOf(token) {
  if (token.origin === "draft") return isFromModel(token) ? "draft" : "lookup";
  return token.origin === "forced" ? "forced" : "target";
}

/** Shows one run. */
export class RunView {
  #shown = null;
  #numBars = 0;
  /** Boxes that stay scrolled to the end until the user scrolls back. */
  #follows = new Set();
  #places = new Map();

  constructor(run, prompt) {
    this.run = run;
    const template = /** @type {any} */ (document.getElementById("run-template"));
    this.root = template.content.firstElementChild.cloneNode(true);
    this.id = `run-${(numViews += 1)}`;
    const heading = this.root.querySelector("h2");
    heading.textContent = run.name;
    heading.id = `${this.id}-name`;
    this.root.setAttribute("aria-labelledby", heading.id);
    this.output = this.root.querySelector(".output");
    this.output.setAttribute("aria-label", `Text, ${run.name}`);
    this.output.setAttribute("role", "region");
    this.bars = this.root.querySelector(".bars");
    this.bars.setAttribute("aria-label", `Rounds, ${run.name}`);
    this.round = this.root.querySelector(".round");
    this.round.append(element("p", {}, HINT));
    if (prompt) this.output.append(element("span", { class: "given" }, prompt));
    for (const box of [this.output, this.bars]) {
      this.#follows.add(box);
      box.addEventListener("scroll", () => this.#scrolled(box));
    }
    // The second run makes the first one narrower, so its text gets more lines.
    new ResizeObserver(() => this.#toEnd()).observe(this.output);
    this.output.addEventListener("mouseover", (event) => this.#pointAtToken(event));
    this.bars.addEventListener("mouseover", (event) => this.#pointAtBar(event));
    this.bars.addEventListener("click", (event) => this.#pointAtBar(event));
    this.bars.addEventListener("focus", () => this.#shown === null && this.show(0));
    this.bars.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Shows new pieces of text and all figures. */
  update(pieces) {
    const { run } = this;
    for (const { text, index, isThought } of pieces) this.#addText(text, index, isThought);
    this.#toEnd();
    this.output.setAttribute("aria-busy", String(run.isRunning));
    this.#addBars();
    const { speed, acceptance } = run;
    this.#figure("speed", speed === null ? "–" : speed.toFixed(speed < 100 ? 1 : 0));
    this.#figure("tokens", String(run.tokens.length));
    this.#figure("steps", String(run.rounds.length));
    this.#figure("accepted", acceptance ? `${share(acceptance.accepted / acceptance.drafted)}` : "–");
    this.#figure("first", run.tokens.length ? duration(run.firstMs) : "–");
    this.root.querySelector(".ending").textContent = run.ending;
  }

  /** Shows a round, and marks its tokens and its bar. Text under the mouse does not scroll. */
  show(number, isFromBar = true) {
    const round = this.run.rounds[number];
    if (!round || number === this.#shown) return;
    this.#shown = number;
    for (const old of this.root.querySelectorAll(".now")) old.classList.remove("now");
    for (const span of this.output.querySelectorAll("[data-token]")) {
      const index = Number(span.dataset.token);
      if (index >= round.start && index < round.start + round.num) span.classList.add("now");
    }
    for (const old of this.bars.querySelectorAll("[aria-selected=true]")) old.setAttribute("aria-selected", "false");
    const bar = this.bars.children[number];
    bar?.setAttribute("aria-selected", "true");
    if (bar) {
      this.bars.setAttribute("aria-activedescendant", bar.id);
      this.#reveal(bar);
    }
    if (isFromBar) this.#scrollTo(this.output.querySelector(".now"));
    this.round.replaceChildren(...roundDetails(this.run, number));
  }

  #figure(name, text) {
    this.root.querySelector(`[data-figure=${name}]`).textContent = text;
  }

  #addText(text, index, isThought) {
    const token = index === null ? null : this.run.tokens[index];
    const last = this.output.lastElementChild;
    if (token && last?.dataset.token === String(index)) {
      last.append(text);
      return;
    }
    const kind = token ? `t ${kindOf(token)}` : "";
    const span = element("span", { class: `${kind}${isThought ? " thought" : ""}` }, text);
    if (token) span.dataset.token = String(index);
    this.output.append(span);
  }

  #addBars() {
    const { rounds } = this.run;
    // The last bar may have grown, if the server reports no steps; at the end all labels get the number of rounds.
    const first = this.run.isRunning ? Math.max(0, Math.min(this.#numBars, rounds.length) - 1) : 0;
    while (this.bars.children.length > first) this.bars.lastElementChild.remove();
    for (let number = first; number < rounds.length; number += 1) this.bars.append(this.#bar(number));
    this.#numBars = rounds.length;
    if (this.#follows.has(this.bars) && this.run.isRunning) this.bars.scrollLeft = this.bars.scrollWidth;
  }

  #bar(number) {
    const { run } = this;
    const round = run.rounds[number];
    const blocks = run.tokens
      .slice(round.start, round.start + round.num)
      .map((token) => element("i", { class: kindOf(token) }));
    const refused = round.step?.nodes.filter((node) => node.state === "rejected").length ?? 0;
    for (let index = 0; index < Math.min(refused, MOST_REFUSED); index += 1) {
      blocks.push(element("i", { class: "refused" }));
    }
    const attributes = {
      class: "bar",
      role: "option",
      id: `${this.id}-round-${number}`,
      "aria-selected": String(number === this.#shown),
      "aria-label": roundSentence(run, number),
      "data-round": String(number),
      "data-accepted": String(acceptedIn(run, round)),
    };
    return element("div", attributes, ...blocks);
  }

  #reveal(bar) {
    const [left, right] = [bar.offsetLeft - this.bars.offsetLeft, bar.offsetLeft - this.bars.offsetLeft + bar.offsetWidth];
    if (left < this.bars.scrollLeft) this.bars.scrollLeft = left - 20;
    if (right > this.bars.scrollLeft + this.bars.clientWidth) this.bars.scrollLeft = right - this.bars.clientWidth + 20;
  }

  #toEnd() {
    if (this.#follows.has(this.output)) this.output.scrollTop = this.output.scrollHeight;
  }

  /** Only scrolling back stops following: a scroll event may come after more text was added. */
  #scrolled(box) {
    const down = box.scrollHeight - box.scrollTop - box.clientHeight;
    const right = box.scrollWidth - box.scrollLeft - box.clientWidth;
    const place = box.scrollTop + box.scrollLeft;
    if (Math.max(down, right) < 40) this.#follows.add(box);
    else if (place < (this.#places.get(box) ?? 0)) this.#follows.delete(box);
    this.#places.set(box, place);
  }

  #scrollTo(span) {
    if (!span) return;
    const [top, { clientHeight, scrollTop }] = [span.offsetTop - this.output.offsetTop, this.output];
    if (top < scrollTop || top > scrollTop + clientHeight - 40) this.output.scrollTop = top - clientHeight / 3;
  }

  #pointAtToken(event) {
    const span = event.target.closest("[data-token]");
    if (span) this.show(this.run.roundOf(Number(span.dataset.token)), false);
  }

  #pointAtBar(event) {
    const bar = event.target.closest("[data-round]");
    if (bar) this.show(Number(bar.dataset.round));
  }

  #key(event) {
    const last = this.run.rounds.length - 1;
    const at = this.#shown ?? -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.show(Math.max(0, Math.min(last, to)));
  }
}
