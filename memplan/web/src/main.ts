/** The page: a form, one plan or two beside each other, and Python in workers. */
import described from "../build/form.json";
import { copy, h, pause } from "./dom";
import { Form } from "./form";
import { Python, Refused } from "./python";
import { Search } from "./search";
import { read, written } from "./state";
import type { Answer, First, Held, Question } from "./types";
import { View } from "./view";

const FIRST = described as unknown as First;
const LONGEST_CONFIG = 6000; // characters of a config.json in a link
const NAMES = ["A", "B"];

const $ = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const brief = $("brief");

let plans: Question[] = [];
let edited = 0;
const answers: (Answer | null)[] = [null, null];
const turns = [0, 0];
let stopsOf = "";
const files = new Map<string, string>();

const quick = new Python();
let slow: Python | null = null;
const allocating = quick.ready.then(() => (slow = started())); // replays take seconds: they have their own Python
const views = NAMES.map((_, i) => new View(i, quick, () => slow ?? quick, FIRST.kinds, () => (plans.length > 1 ? `Plan ${NAMES[i]}` : "")));
const form = new Form(FIRST, $("plan"), (question, settled) => change(question, settled), (file) => void open(file));

// --- State ------------------------------------------------------------------------------------------------

/** Shows the plans of the address; without any, the example, whose answers came with the page. */
function restore(): void {
  const found = read(location.hash);
  plans = found.length ? found : [{ ...FIRST.example }];
  edited = Math.min(edited, plans.length - 1);
  for (const plan of plans) if (plan.config && plan.model) remember(plan.model, plan.config);
  layout();
  plans.forEach((_, i) => ask(i));
}

function change(question: Question, settled: boolean): void {
  const kept = files.get(question.model ?? "");
  const { config: _, ...rest } = question;
  plans[edited] = kept && kept.length <= LONGEST_CONFIG ? { ...rest, config: kept } : rest;
  if (settled) history.replaceState(null, "", written(plans));
  ask(edited);
}

async function open(file: File): Promise<void> {
  try {
    const text = await file.text();
    const { model } = await quick.call("keep", file.name, text);
    remember(model, shortened(text));
    change({ ...plans[edited], model }, true);
  } catch (error) {
    turns[edited]!++;
    refuse(edited, error as Error);
  }
}

const shortened = (text: string) => {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text;
  }
};

function started(): Python {
  const python = new Python();
  for (const [name, text] of files) void python.call("keep", name, text).catch(() => {});
  return python;
}

/** Has a file in every Python before anything is asked about it. */
function remember(name: string, text: string): void {
  if (files.get(name) === text) return;
  files.set(name, text);
  for (const python of [quick, slow]) void python?.call("keep", name, text).catch(() => {});
}

// --- Answers ----------------------------------------------------------------------------------------------

/** Asks for a plan's answers: the record's at once, the allocator's when nothing newer is asked. */
function ask(i: number): void {
  const turn = ++turns[i]!;
  const current = () => turn === turns[i] && i < plans.length;
  const { config: _, ...question } = plans[i]!;
  const view = views[i]!;
  view.expect();
  if (i === edited) stops(question);
  void compare();
  if (!quick.isReady) {
    if (JSON.stringify(question) === JSON.stringify(FIRST.example)) return show(i, FIRST.answer, FIRST.held);
    if (!answers[i]) view.wait("Python is starting in this browser …");
    if (i === edited) form.show(question, answers[i] ?? null);
  }
  quick.latest(`answer ${i}`, "answer", question).then(async (answer) => {
    if (!current()) return;
    show(i, answer, null);
    await pause();
    if (!current()) return;
    const python = await allocating;
    const held = await python.latest(`held ${i}`, "held", question);
    if (!current()) return;
    view.judge(answer, held);
    say(i, held.finding, held.verdict ?? "");
    const { disagreement } = await python.latest(`others ${i}`, "others", question);
    if (current()) view.disagree(disagreement);
  }).catch((error: Error) => current() && refuse(i, error));
}

/** The sliders' stops hang on the cluster and the engine only. */
function stops({ cluster = "", engine = "" }: Question): void {
  const about = `${cluster} ${engine}`;
  if (about === stopsOf || !quick.isReady) return;
  stopsOf = about;
  quick.latest("stops", "stops", { ...(cluster && { cluster }), ...(engine && { engine }) }).then((found) => form.stop(found), () => {});
}

function show(i: number, answer: Answer, held: Held | null): void {
  answers[i] = answer;
  const { config: _, ...question } = plans[i]!;
  const longest_s = Math.max(...answers.slice(0, plans.length).map((each) => each?.step_s ?? 0));
  views.forEach((view) => view.scale(longest_s));
  views[i]!.answer(question, answer, held);
  if (i === edited) form.show(question, answer);
  if (held) say(i, held.finding, held.verdict ?? "");
  else brief.dataset.state = "pending";
}

function refuse(i: number, error: Error): void {
  views[i]!.refuse(error.message);
  if (i === edited) form.show(plans[i]!, null);
  say(i, error.message, "refused");
  if (!(error instanceof Refused)) console.error(error);
}

/** The line at the top, which screen readers are told of. */
function say(i: number, text: string, verdict: string): void {
  if (i !== edited) return;
  brief.dataset.verdict = verdict;
  brief.textContent = text;
  brief.title = text;
  brief.dataset.state = "";
}

// --- Two plans --------------------------------------------------------------------------------------------

const compared = h("details", { class: "card", ontoggle: () => void compare() }, h("summary", {}, "Which is better, and why"), h("pre", { tabindex: 0 }));

function layout(): void {
  const two = plans.length > 1;
  const tabs = NAMES.map((name, i) => h("button", { type: "button", "aria-pressed": String(i === edited), onclick: () => edit(i) }, `Edit plan ${name}`));
  $("found").replaceChildren(
    search.element,
    ...(two ? [h("div", { class: "segments", role: "group", "aria-label": "the plan that the form edits" }, ...tabs), compared] : []),
    h("div", { class: two ? "views two" : "views" }, ...views.slice(0, plans.length).map(({ element }) => element)),
  );
  $("beside").textContent = two ? "One plan" : "Compare";
  document.body.classList.toggle("two", two);
}

/** Which plan is better, in the package's words; asked for anew whenever a plan changes. */
async function compare(): Promise<void> {
  if (!compared.open || plans.length < 2) return;
  const content = compared.querySelector("pre")!;
  content.textContent = "…";
  const [a, b] = plans.map(({ config: _, ...question }) => question) as [Question, Question];
  const said = await (await allocating).latest("compared", "compared", a, b).then(({ text }) => text, (error: Error) => error.message);
  content.textContent = said;
}

function edit(i: number): void {
  edited = i;
  layout();
  form.show(plans[i]!, answers[i] ?? null);
}

$("beside").addEventListener("click", () => {
  plans = plans.length > 1 ? [plans[edited]!] : [plans[0]!, { ...plans[0]! }];
  edited = plans.length - 1;
  history.replaceState(null, "", written(plans));
  layout();
  plans.forEach((_, i) => ask(i));
});

// --- A search ---------------------------------------------------------------------------------------------

const search = new Search(FIRST.varied, async () => slow ?? (await allocating), () => plans[edited]!, (question) => {
  change(question, true);
  scrollTo({ top: 0 });
});
$("search").addEventListener("click", () => {
  search.element.hidden = !search.element.hidden;
  if (!search.element.hidden) search.element.scrollIntoView({ block: "nearest" });
});

// --- The page ---------------------------------------------------------------------------------------------

$("link").addEventListener("click", (event) => {
  history.replaceState(null, "", written(plans));
  void copy(event.currentTarget as HTMLElement, location.href);
});
$("skip").addEventListener("click", () => $("found").focus());
addEventListener("hashchange", restore);
addEventListener("dragover", (event) => event.preventDefault());
window.addEventListener("drop", (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer?.files ?? [];
  if (file) void open(file);
});
let resizing: ReturnType<typeof setTimeout>;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => views.forEach((view) => view.resized()), 150);
});

$("about").append(
  `memplan ${FIRST.version}. Every number is computed by the Python package in this browser; nothing that you enter leaves it. `,
  h("span", { id: "state" }, "Python is starting."),
);
restore();
quick.ready.then(
  () => {
    $("state").textContent = `Python was ready after ${(performance.now() / 1000).toFixed(1)} s.`;
    performance.mark("python");
    document.documentElement.dataset.ready = "yes";
    stops(plans[edited]!);
    if (brief.dataset.state === "pending") plans.forEach((_, i) => ask(i));
  },
  (error: Error) => {
    const why = `Python did not start in this browser: ${error.message}`;
    $("state").textContent = why;
    plans.forEach((_, i) => answers[i] || refuse(i, new Error(why)));
  },
);
// Milliseconds from a question to its answer, for whoever measures the page.
Object.assign(window, {
  memplanTimes: async (question: Question) => {
    const start = performance.now();
    await quick.call("answer", question);
    return performance.now() - start;
  },
});
if (import.meta.env.PROD && "serviceWorker" in navigator) void navigator.serviceWorker.register("./offline.js").catch(() => {});
