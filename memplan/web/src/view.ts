/** What the page shows of one plan. */
import * as charts from "./charts";
import { bytes, copies, fill, h, pause, seconds, short, whole } from "./dom";
import type { Answer, Calls, Collective, Held, Question, Row, Verdict } from "./types";
import type { Python } from "./python";

const MARKS: Record<Verdict, string> = { fits: "✓", "fits, tight": "≈", "cannot say": "?", "does not fit": "✕" };

export class View {
  readonly element = h("section", { class: "view" });
  private verdict = h("div", { class: "card verdict" });
  private body = h("div", { class: "body" });
  private panels = new Map<string, boolean>();
  private shown: Answer | null = null;
  private question: Question = {};

  private turn = 0;
  private width = 0;
  private longest_s = 0;
  private heights = new Map<string, number>();

  /**
   * `quick` answers what a record says, `slow` what takes replays; `kinds` are the kinds of bytes in the package's order;
   * `title` names the plan where there are two.
   */
  constructor(private slot: number, private quick: Python, private slow: () => Python, private kinds: string[], private title: () => string) {
    this.element.append(this.verdict, this.body);
  }

  /** Marks the view as being about another plan than the one asked for, until that one's answer is there. */
  expect(): void {
    this.element.setAttribute("aria-busy", "true");
  }

  /** What the page says before Python is there. */
  wait(why: string): void {
    this.shown = null;
    fill(this.body);
    this.verdict.dataset.verdict = "";
    fill(this.verdict, this.heading(), h("p", { class: "finding" }, why));
  }

  /** The package's sentence for a plan that it refuses. */
  refuse(sentence: string): void {
    this.element.setAttribute("aria-busy", "false");
    this.shown = null;
    fill(this.body);
    this.verdict.dataset.verdict = "refused";
    fill(this.verdict, this.heading(), mark("!", "refused"), h("p", { class: "finding error" }, sentence));
  }

  answer(question: Question, answer: Answer, held: Held | null): void {
    this.shown = answer;
    this.question = question;
    this.judge(answer, held);
    this.draw();
  }

  /** The verdict's card; without `held` as far as the record alone says. */
  judge(answer: Answer, held: Held | null): void {
    this.element.setAttribute("aria-busy", String(!held));
    const verdict = held?.verdict ?? answer.verdict;
    this.verdict.dataset.verdict = verdict ?? (answer.needs_replay && !held ? "pending" : "none");
    const said = verdict ?? (answer.needs_replay && !held ? "…" : "no verdict");
    fill(
      this.verdict,
      this.heading(),
      mark(verdict ? MARKS[verdict] : null, said),
      h("p", { class: "finding" }, held?.finding ?? `${answer.model.name}: ${bytes(answer.peak_bytes)} of tensors; replaying the allocator`),
      gauge(answer, held),
      h("dl", { class: "tiles" }, ...tiles(answer)),
      h("p", { class: "exact" }, "Tensors at the worst instant: ", h("output", { class: "bytes" }, whole(answer.peak_bytes)), ` bytes, stage ${answer.worst}, in ${answer.when}.`),
      ...(held ? [h("p", { class: "reason" }, held.reason.replaceAll("\n", " "))] : []),
      command(answer.command),
    );
  }

  /** Adds what other implementations' verdicts are. */
  disagree(sentences: string[]): void {
    this.verdict.querySelector(".command")?.before(...sentences.map((each) => h("p", { class: "reason" }, each)));
  }

  /** Draws all cards anew if the page has another width. */
  resized(): void {
    if (this.width !== this.element.clientWidth) this.draw();
  }

  /** Draws steps to the scale of the longest one, so that two plans can be compared. */
  scale(longest_s: number): void {
    if (longest_s === this.longest_s) return;
    this.longest_s = longest_s;
    if (this.shown) this.draw();
  }

  private draw(): void {
    const answer = this.shown;
    if (!answer) return;
    this.turn++;
    this.width = this.element.clientWidth;
    const width = Math.max(280, this.width - 42);
    fill(
      this.body,
      card("Memory", answer.stages.length > 1 ? "at each stage's worst instant; figures: the stage that holds most" : `at the worst instant, in ${answer.when}`, charts.stages(answer, width)),
      this.panel("Bytes over a step", () => this.step(answer, width), true),
      answer.time ? card("Time of a step", answer.time_label, charts.step(answer, this.longest_s, width)) : card("Time of a step", "", h("p", {}, `No step time: ${answer.time_missing.join("; ")}.`)),
      answer.stages.length > 1 && answer.time ? this.panel("Schedule", () => this.schedule(width), true) : null,
      answer.collectives.length ? card("Collectives", `of stage ${answer.busiest}, which sends most: ${bytes(answer.sent_bytes)} a step`, collectives(this.named("Collectives"), answer.collectives)) : null,
      this.panel("Ledger: every tensor at the worst instant", () => this.ledger()),
      answer.targets.length ? this.panel("Run it: files for launchers", () => this.run(answer)) : null,
      this.panel("All of it as text, as memplan estimate --details prints it", () => this.text()),
      card("How far to trust it", "", h("p", {}, answer.trust), ...answer.notes.map((note) => h("p", {}, note)), h("p", { class: "about" }, `Code: ${answer.model.code}. ${whole(answer.model.parameters)} parameters. ${answer.batch}.`)),
    );
  }

  /** A name that no other plan's table has. */
  private named(title: string): string {
    return [title, this.title()].filter(Boolean).join(", ");
  }

  private heading(): HTMLElement | null {
    return this.title() ? h("h2", {}, this.title()) : null;
  }

  /** A card that asks for its content when it is first opened, and stays open for the next plan. */
  private panel(title: string, content: () => Promise<Node>, open = false): HTMLElement {
    const inside = h("div", { style: `min-height:${this.heights.get(title) ?? 0}px` });
    const turn = this.turn;
    const fills = async () => {
      await pause();
      if (turn !== this.turn) return; // a newer plan is shown already
      try {
        fill(inside, await content());
      } catch (error) {
        fill(inside, h("p", { class: "error" }, (error as Error).message));
      }
      inside.style.minHeight = "";
      if (inside.clientHeight) this.heights.set(title, inside.clientHeight); // the next plan's starts as high
    };
    const element: HTMLDetailsElement = h("details", { class: "card", open: this.panels.get(title) ?? open, ontoggle: () => {
      this.panels.set(title, element.open);
      if (element.open && !inside.dataset.asked) {
        inside.dataset.asked = "yes";
        void fills();
      }
    } }, h("summary", {}, title), inside);
    return element;
  }

  /** The answer to a call about this plan; a newer one replaces it. */
  private latest<K extends "schedule" | "step" | "ledger" | "text">(python: Python, name: K) {
    return python.latest(`${name} ${this.slot}`, name, ...([this.question] as Parameters<Calls[K]>));
  }

  private async step(answer: Answer, width: number): Promise<Node> {
    const { phases, stage } = await this.latest(this.quick, "step");
    const of = answer.stages.length > 1 ? `Stage ${stage}, which holds most. ` : "";
    return h("div", {}, charts.timeline(phases, this.kinds, answer, width), h("p", { class: "about" },
      `${of}In the order of allocations and frees, not to the scale of time; of many equal micro-batches the first and the last.`));
  }

  private async schedule(width: number): Promise<Node> {
    const { passes, shown, n_micro_batches } = await this.latest(this.quick, "schedule");
    const of = shown < n_micro_batches ? `The first ${shown} micro-batches stand for all ${n_micro_batches}: the pipeline fills, turns and drains as shown.` : `All ${shown} micro-batches.`;
    return h("div", {}, charts.schedule(passes, width), h("p", { class: "about" }, of));
  }

  private async ledger(): Promise<Node> {
    const { stage, when, rows } = await this.latest(this.quick, "ledger");
    const total = rows.reduce((sum, row) => sum + row.total_bytes, 0);
    return h("div", {}, h("p", { class: "about" }, `Stage ${stage}, in ${when}: ${whole(total)} bytes in ${rows.length} rows.`), ledgerTable(this.named("Ledger"), rows));
  }

  private async text(): Promise<Node> {
    const { text } = await this.latest(this.slow(), "text");
    return h("div", {}, copies("Copy", () => text), h("pre", { tabindex: 0 }, text));
  }

  private async run(answer: Answer): Promise<Node> {
    const file = h("div", { class: "file", "aria-live": "polite" });
    const buttons = answer.targets.map((to) => h("button", { type: "button", "aria-pressed": "false", onclick: async (event) => {
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === event.currentTarget));
      try {
        const found = await this.quick.call("export", this.question, to);
        const url = `data:text/plain;charset=utf-8,${encodeURIComponent(found.text)}`;
        file.replaceChildren(h("p", {}, copies("Copy", () => found.text), " ", h("a", { href: url, download: found.file }, `Download ${found.file}`)),
          ...found.notes.map((note) => h("p", { class: "muted" }, note)), h("pre", { tabindex: 0 }, found.text));
      } catch (error) {
        file.replaceChildren(h("p", { class: "error" }, (error as Error).message));
      }
    } }, to));
    return h("div", {}, h("div", { class: "segments", role: "group", "aria-label": "launchers" }, ...buttons), file);
  }
}

function command(line: string | null): HTMLElement {
  return line === null ? h("p", { class: "command" }, "No command line can name this model or cluster.")
    : h("p", { class: "command" }, h("code", { tabindex: 0 }, line), copies("Copy", () => line));
}

function mark(sign: string | null, said: string): HTMLElement {
  return h("p", { class: "mark" }, sign ? h("i", { "aria-hidden": "true" }, sign) : null, h("span", {}, said));
}

function card(title: string, about: string, ...content: (Node | null)[]): HTMLElement {
  return h("section", { class: "card" }, h("h2", {}, title), about ? h("p", { class: "about" }, about) : null, ...content);
}

function* tiles(answer: Answer): Generator<HTMLElement> {
  const tile = (name: string, figure: string) => h("div", {}, h("dt", {}, name), h("dd", {}, figure));
  const band = answer.tokens_per_s_band;
  if (answer.tokens_per_s !== null) yield tile("tokens/s", band ? `${short(Number(band[0].toPrecision(2)))}–${short(Number(band[1].toPrecision(2)))}` : short(answer.tokens_per_s));
  if (answer.step_s !== null) yield tile("a step", seconds(answer.step_s));
  if (answer.mfu !== null) yield tile("MFU", `${(100 * answer.mfu).toFixed(0)} %`);
  yield tile("a GPU sends", answer.sent_bytes ? bytes(answer.sent_bytes) : "nothing");
  if (answer.host_bytes) yield tile("its host holds", bytes(answer.host_bytes));
}

/** What a GPU holds against what it has: tensors, then up to what the allocator may reserve. */
function gauge(answer: Answer, held: Held | null): HTMLElement | null {
  const usable = answer.cluster?.usable_bytes;
  const budget = answer.cluster?.budget_bytes;
  if (!usable || !budget) return null;
  const [low, high] = held?.device_bytes ?? [answer.peak_bytes, answer.peak_bytes];
  const full = Math.max(usable * 1.02, high);
  const at = (n: number) => `${((100 * n) / full).toFixed(2)}%`;
  return h("div", { class: "gauge", role: "img", "aria-label": `A GPU holds ${bytes(low)} to ${bytes(high)} of ${bytes(usable)}; ${bytes(budget)} are the budget` },
    h("i", { class: "low", style: `width:${at(low)}` }), h("i", { class: "high", style: `left:${at(low)};width:${at(high - low)}` }),
    h("i", { class: "budget", style: `left:${at(budget)}` }), h("i", { class: "usable", style: `left:${at(usable)}` }));
}

function collectives(title: string, rows: Collective[]): HTMLElement {
  const sorted = [...rows].sort((a, b) => b.wire_bytes - a.wire_bytes);
  return table(title, ["collective", "axis", "what", "calls", "payload", "sent"], [3, 4, 5], sorted.map((c) =>
    [c.kind, c.axis, c.what, whole(c.calls), bytes(c.payload_bytes), c.wire_bytes ? bytes(c.wire_bytes) : "0"]));
}

function ledgerTable(title: string, rows: Row[]): HTMLElement {
  return table(title, ["bytes", "kind", "name", "type", "shape", "count", "bytes each"], [0, 5, 6], rows.map((row) =>
    [whole(row.total_bytes), row.kind, row.name, row.dtype, row.shape.join(" × ") || "scalar", whole(row.count), whole(row.each_bytes)]));
}

/** A table; `figures` are the columns of figures. */
export function table(title: string, names: string[], figures: number[], rows: (string | Node)[][]): HTMLElement {
  const cells = (tag: "td" | "th", row: (string | Node)[]) => row.map((cell, i) => h(tag, { class: figures.includes(i) ? "figure" : null, scope: tag === "th" ? "col" : null }, cell));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
    h("table", {}, h("thead", {}, h("tr", {}, ...cells("th", names))), h("tbody", {}, ...rows.map((row) => h("tr", {}, ...cells("td", row))))));
}
