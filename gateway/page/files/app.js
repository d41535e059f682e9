// The form and its submission.

import { Failure, models } from "./stream.js";
import { Run, compared } from "./run.js";
import { counted } from "./text.js";
import { element } from "./tree.js";
import { RunView } from "./view.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens",
];
const INPUT_OF = { stop: "stop_strings", messages: "prompt", max_completion_tokens: "max_tokens", speculation: "max_draft_tokens" };
const NARROW = "(max-width: 52rem)";
const byId = (id) => /** @type {any} */ (document.getElementById(id));
const conversation = [];
let stopping = null;
let countdown = 0;

function isChat() {
  return byId("form").elements.mode.value === "chat";
}

/** A random seed that JSON and people can carry. */
function newSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

function numberIn(id) {
  const input = byId(id);
  const text = input.value.trim();
  if (input.validity.badInput || (text && !Number.isFinite(Number(text)))) {
    throw new Failure(`${id}: this is not a number.`, { param: id });
  }
  return text === "" ? undefined : Number(text);
}

function seedIn() {
  const text = byId("seed").value.trim();
  if (!text) return newSeed();
  if (!/^-?\d{1,16}$/.test(text) || !Number.isSafeInteger(Number(text))) {
    throw new Failure("seed: must be a whole number of at most 15 digits.", { param: "seed" });
  }
  return Number(text);
}

function stopsIn() {
  const lines = byId("stop_strings").value.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
}

/**
 * The request of the form: path and body. Throws Failure if a field is invalid.
 * @returns {{path: string, body: Record<string, any>}}
 */
function requestOf(text) {
  /** @type {Record<string, any>} */
  const body = { stream: true, stream_options: { include_usage: true }, return_token_origins: true, return_steps: true };
  for (const name of NUMBERS) {
    const value = numberIn(name);
    if (value !== undefined) body[name] = value;
  }
  body.seed = seedIn();
  const stops = stopsIn();
  if (stops.length) body.stop = stops;
  if (byId("model").value) body.model = byId("model").value;
  const most = numberIn("max_draft_tokens");
  // Only coupled verification gives equal text with and without speculation.
  body.speculation = { verify_mode: "coupled", ...(most === undefined ? {} : { max_draft_tokens: most }) };
  if (!isChat()) {
    if (!text) throw new Failure("prompt: write a text to continue.", { param: "prompt" });
    return { path: "v1/completions", body: { ...body, prompt: text, logprobs: 0 } };
  }
  if (!text.trim()) throw new Failure("prompt: write a message.", { param: "prompt" });
  const system = byId("system").value.trim();
  const before = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const messages = [...before, { role: "user", content: text }];
  return { path: "v1/chat/completions", body: { ...body, messages, logprobs: true, top_logprobs: 0 } };
}

function showError(error) {
  const param = error.param ? error.param.split(/[.[]/)[0] : null;
  const input = param && byId(INPUT_OF[param] ?? param);
  byId("error").textContent = error.message;
  if (input?.matches("input, textarea, select")) {
    if (byId("settings").contains(input)) byId("settings").open = true;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-errormessage", "error");
    input.focus();
  }
  if (error.delay) showDelay(error.message, error.delay);
}

/** Counts down beside the error, hidden from screen readers: a live region would speak every second. */
function showDelay(message, seconds) {
  let left = seconds;
  const tell = () => {
    byId("countdown").textContent = left > 0 ? `Try again in ${left} s.` : "";
    if (left <= 0) {
      clearInterval(countdown);
      byId("error").textContent = `${message} You can try again now.`;
    }
    left -= 1;
  };
  clearInterval(countdown);
  tell();
  countdown = setInterval(tell, 1000);
}

function clearErrors() {
  clearInterval(countdown);
  byId("error").textContent = byId("countdown").textContent = "";
  for (const input of document.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-errormessage");
  }
}

function setBusy(isBusy) {
  const [off, on] = isBusy ? [byId("send"), byId("stop")] : [byId("stop"), byId("send")];
  on.disabled = false;
  // A disabled button loses the focus, which keyboard users need.
  if (document.activeElement === off) on.focus();
  off.disabled = true;
  for (const radio of byId("form").elements.mode) radio.disabled = isBusy;
  byId("clear").disabled = isBusy;
}

async function oneRun(name, isSpeculating, request, key) {
  const run = new Run(name, isSpeculating);
  const view = new RunView(run, request.body.prompt ?? "");
  byId("runs").append(view.root);
  byId("status").textContent = `${name}: generating.`;
  await run.run(request, key, stopping.signal, (_, pieces) => view.update(pieces)).catch((error) => {
    run.ending = error.name === "AbortError" ? `Stopped after ${counted(run.tokens.length, "token")}.` : "Ended by an error.";
    view.update([]);
    if (error.name !== "AbortError") throw error;
  });
  return run;
}

function showVerdict(fast, plain, isWhole) {
  const { kind, text } = compared(fast, plain, isWhole);
  const verdict = byId("verdict");
  verdict.className = kind === "differs" ? "differs" : kind === "equal" ? "equal" : "";
  const parts = [element("strong", {}, text)];
  if (fast.speed && plain.speed) {
    const ratio = fast.speed / plain.speed;
    const speeds = `${fast.speed.toFixed(0)} against ${plain.speed.toFixed(0)} tokens/s`;
    parts.push(` Speed with speculation${ratio < 1 ? " (slower this time)" : ""}: ${ratio.toFixed(2)} times plain decoding, ${speeds}.`);
  }
  verdict.replaceChildren(...parts);
}

async function generate() {
  if (stopping) return;
  clearErrors();
  const text = byId("prompt").value;
  const key = byId("key").value.trim();
  let request;
  try {
    request = requestOf(text);
  } catch (error) {
    showError(error);
    return;
  }
  const chat = isChat();
  stopping = new AbortController();
  setBusy(true);
  byId("runs").replaceChildren();
  byId("verdict").replaceChildren();
  byId("verdict").className = "";
  if (matchMedia(NARROW).matches) byId("results").scrollIntoView();
  let fast = null;
  try {
    fast = await oneRun("With speculation", true, request, key);
    if (byId("compare").checked && !stopping.signal.aborted) {
      const plain = await oneRun("Without speculation", false, request, key);
      if (plain.tokens.length) showVerdict(fast, plain, !stopping.signal.aborted);
    }
    const how = stopping.signal.aborted ? "Stopped" : "Done";
    byId("status").textContent = `${how}: ${counted(fast.tokens.length, "token")}, seed ${request.body.seed}.`;
  } catch (error) {
    byId("status").textContent = "";
    showError(error instanceof Failure ? error : new Failure(`This page failed: ${error.message}`));
  } finally {
    stopping = null;
    setBusy(false);
  }
  if (chat && fast?.text) {
    conversation.push({ role: "user", content: text }, { role: "assistant", content: fast.text });
    byId("prompt").value = "";
    showConversation();
  }
}

function showConversation() {
  const items = conversation.map(({ role, content }) => {
    return element("li", { class: role }, element("b", {}, role === "user" ? "You" : "Model"), content);
  });
  byId("messages").replaceChildren(...items);
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

function showMode() {
  const chat = isChat();
  byId("conversation").hidden = !chat;
  byId("system-field").hidden = !chat;
  byId("prompt-label").textContent = chat ? "Your message" : "Prompt";
  byId("send").textContent = chat ? "Send" : "Generate";
}

async function listModels() {
  try {
    const names = await models(byId("key").value.trim());
    const chosen = byId("model").value;
    const options = names.map((name) => element("option", { value: name }, name));
    byId("model").replaceChildren(element("option", { value: "" }, "the served model"), ...options);
    byId("model").value = names.includes(chosen) ? chosen : "";
  } catch {
    // The next request shows the error.
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("stop").addEventListener("click", () => stopping?.abort());
byId("clear").addEventListener("click", () => {
  conversation.length = 0;
  showConversation();
});
byId("key").addEventListener("change", listModels);
for (const radio of byId("form").elements.mode) radio.addEventListener("change", showMode);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopping?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
if (matchMedia(NARROW).matches) byId("settings").open = false;
showMode();
listModels();
