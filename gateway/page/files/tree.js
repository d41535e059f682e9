// The proposed tree of a round, as a picture and as a table.

import { counted, duration, percent, share, shown } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, GAP_X, GAP_Y] = [150, 38, 22, 8];
const BECAME = { accepted: "✓ accepted", rejected: "✗ rejected", unverified: "– not verified", target: "the target's own" };

/** A new element with attributes and children. */
export function element(tag, attributes = {}, ...children) {
  const made = attributes.xmlns ? document.createElementNS(attributes.xmlns, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (name !== "xmlns") made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function svg(tag, attributes, ...children) {
  return element(tag, { xmlns: SVG, ...attributes }, ...children);
}

/** A sentence with the result of a round. */
export function roundSentence(run, number) {
  const round = run.rounds[number];
  const accepted = acceptedIn(run, round);
  const head = `Round ${number + 1} of ${run.rounds.length}: ${counted(round.num, "token")}`;
  if (!round.step) return `${head}, ${accepted} of them drafted`;
  const verified = round.step.nodes.filter((node) => node.state !== "unverified").length;
  const what = verified ? `, ${accepted} of ${verified} drafted tokens accepted` : ", no tokens drafted";
  return `${head}${what}, ${duration(round.step.step_ms)}`;
}

/** Number of a round's tokens that were proposed and accepted. */
export function acceptedIn(run, round) {
  if (round.step) return Math.min(round.num, round.step.nodes.filter((node) => node.state === "accepted").length);
  return run.tokens.slice(round.start, round.start + round.num).filter((token) => token.origin === "draft").length;
}

/** The details of a round, as elements. */
export function roundDetails(run, number) {
  const round = run.rounds[number];
  const parts = [element("h3", {}, roundSentence(run, number))];
  if (!round.step) return [...parts, element("p", {}, "The server does not report the proposed tree.")];
  parts.push(element("p", {}, timesOf(run, number)));
  const nodes = nodesOf(run, round);
  parts.push(element("div", { class: "tree", tabindex: "0", role: "group", "aria-label": "Tree" }, picture(nodes)));
  const table = element("details", {}, element("summary", {}, "As a table"), tableOf(nodes));
  return [...parts, table];
}

function timesOf(run, number) {
  const { step } = run.rounds[number];
  const before = number > 0 ? run.rounds[number - 1].step : null;
  const parts = [`Committed ${duration(step.at_ms)} after the request's arrival`];
  if (before) parts.push(`${duration(Math.max(0, step.at_ms - before.at_ms))} after the previous round`);
  parts.push(`the target's step took ${duration(step.step_ms)}`);
  if (step.draft_ms) parts.push(`drafting ${duration(step.draft_ms)}`);
  if (step.hold_off_ms) parts.push(`it waited ${duration(step.hold_off_ms)} for the draft`);
  const rest = step.suspended && run.isSpeculating ? " Speculation is suspended after it: plain decoding was measured to be faster." : "";
  return `${parts.join(", ")}.${rest}`;
}

/** The nodes, and after the accepted ones the target's own tokens. Each has `parent`, null at the root. */
export function nodesOf(run, round) {
  const tokens = run.tokens.slice(round.start, round.start + round.num);
  let [above, numAccepted] = [null, 0];
  const nodes = round.step.nodes.map((node, index) => {
    if (node.state !== "accepted") return { ...node, by: node.drafter === "forced" ? "forced" : drafterOf(node) };
    const token = tokens[numAccepted];
    [above, numAccepted] = [index, numAccepted + 1];
    return { ...node, by: token?.origin === "forced" ? "forced" : drafterOf(token) };
  });
  for (const token of tokens.slice(numAccepted)) {
    nodes.push({ text: token.text, parent: above, score: null, logprob: token.logprob, state: "target", by: "" });
    above = nodes.length - 1;
  }
  return nodes;
}

/** The drafter of a token: the name of a drafter without a model, otherwise "draft". */
function drafterOf(token) {
  return isFromModel(token) ? "draft" : token.drafter;
}

/** Whether the draft model drafted a token. */
export function isFromModel(token) {
  return !token?.drafter || token.drafter === "draft_model";
}

function chances(node) {
  const draft = node.score === null ? "" : `${node.by} ${share(node.score)}`;
  const target = node.logprob === null ? "" : `target ${percent(node.logprob)}`;
  return [draft, target].filter(Boolean).join(" · ");
}

/** The tooltip of a node: its drafter, its probabilities and its result. */
function hint(node) {
  const by = { "": "", draft: "proposed by the draft model", forced: "the constraint allowed nothing else" }[node.by] ?? `proposed by ${node.by}`;
  return [shown(node.text), by, chances(node), BECAME[node.state] ?? node.state].filter(Boolean).join("\n");
}

/** Places: depth to the right, the taken path on top; each other branch on the first row below with room for it. */
function placed(nodes) {
  const children = new Map();
  nodes.forEach((node, index) => children.set(node.parent, [...(children.get(node.parent) ?? []), index]));
  const rank = (index) => ["accepted", "target", "rejected"].indexOf(nodes[index].state) >>> 0;
  for (const below of children.values()) below.sort((a, b) => rank(a) - rank(b) || a - b);
  const length = (index) => 1 + (children.has(index) ? length(children.get(index)[0]) : 0);
  const places = [];
  const taken = [];
  const rowFor = (above, depth, num) => {
    for (let row = above; ; row += 1) {
      taken[row] ??= new Set();
      const columns = Array.from({ length: num + 1 }, (_, column) => depth + column);
      if (columns.some((column) => taken[row].has(column))) continue;
      columns.forEach((column) => taken[row].add(column));
      return row;
    }
  };
  const visit = (parent, depth, row) => {
    (children.get(parent) ?? []).forEach((index, order) => {
      const own = order === 0 && parent !== null ? row : rowFor(order === 0 ? row : row + 1, depth, length(index));
      places[index] = { depth, row: own };
      visit(index, depth + 1, own);
    });
  };
  visit(null, 0, 0);
  return places;
}

function picture(nodes) {
  const places = placed(nodes);
  const at = (index) => ({ x: places[index].depth * (WIDTH + GAP_X) + 1, y: places[index].row * (HEIGHT + GAP_Y) + 1 });
  const [edges, boxes] = [[], []];
  let [right, bottom] = [0, 0];
  nodes.forEach((node, index) => {
    const { x, y } = at(index);
    [right, bottom] = [Math.max(right, x + WIDTH), Math.max(bottom, y + HEIGHT)];
    const taken = ["accepted", "target"].includes(node.state);
    if (node.parent !== null) {
      const from = at(node.parent);
      const middle = x - GAP_X / 2;
      const line = `M${from.x + WIDTH} ${from.y + HEIGHT / 2}H${middle}V${y + HEIGHT / 2}H${x}`;
      edges.push(svg("path", { d: line, class: taken ? "taken" : "" }));
    }
    boxes.push(
      svg(
        "g",
        { class: node.state, transform: `translate(${x} ${y})` },
        svg("title", {}, hint(node)),
        svg("rect", { width: WIDTH, height: HEIGHT, rx: node.state === "target" ? 14 : 4 }),
        svg("text", { x: 8, y: 16 }, `${{ accepted: "✓ ", rejected: "✗ " }[node.state] ?? ""}${shown(node.text)}`),
        svg("text", { x: 8, y: 32, class: "small" }, chances(node)),
      ),
    );
  });
  const [width, height] = [right + 1, bottom + 1];
  const label = `${counted(nodes.length, "token")}; the table below has the same data`;
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...edges, ...boxes);
}

function tableOf(nodes) {
  const depth = (index) => (nodes[index].parent === null ? 1 : 1 + depth(nodes[index].parent));
  const head = ["Depth", "Token", "Follows", "Drafted", "Target", "Result"];
  const rows = nodes.map((node, index) => [
    String(depth(index)),
    shown(node.text),
    node.parent === null ? "the committed text" : shown(nodes[node.parent].text),
    node.score === null ? "" : `${node.by} ${share(node.score)}`,
    node.logprob === null ? "" : percent(node.logprob),
    BECAME[node.state] ?? node.state,
  ]);
  const cells = (tag, texts) => element("tr", {}, ...texts.map((text) => element(tag, tag === "th" ? { scope: "col" } : {}, text)));
  return element(
    "table",
    {},
    element("thead", {}, cells("th", head)),
    element("tbody", {}, ...rows.map((row) => cells("td", row))),
  );
}
