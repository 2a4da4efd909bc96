/** A search for the best plan: what it varies, how far it is, what it has found. */
import { bytes, fill, h, seconds, whole } from "./dom";
import type { Python } from "./python";
import type { Best, Found, Question, Verdict } from "./types";
import { table } from "./view";

export class Search {
  readonly element = h("section", { class: "card search", hidden: true, "aria-label": "Search" });
  private bar = h("progress", { max: 1, value: 0, "aria-label": "plans seen" });
  private said = h("p", { class: "muted", role: "status" });
  private found = h("div", {});
  private button = h("button", { type: "button", class: "first", onclick: () => (this.stop ? this.end("Stopped. ") : void this.start()) }, "Search");
  private boxes: HTMLInputElement[];
  private stop: (() => void) | null = null;
  private last: Found | null = null;
  private verdicts = new Map<string, string>();
  private run = 0;

  /** `show` puts a plan that was found into the form. */
  constructor(varied: string[], private python: () => Promise<Python>, private question: () => Question, private show: (question: Question) => void) {
    this.boxes = varied.map((name) => h("input", { type: "checkbox", value: name, checked: true, id: `vary-${name}` }));
    this.bar.hidden = true;
    this.element.append(
      h("h2", {}, "Find the best plan"),
      h("p", { class: "about" }, "The fastest that fits, of all plans of this job that differ in these fields. The others stay as they are in the form."),
      h("div", { class: "vary", role: "group", "aria-label": "fields that are varied" }, ...this.boxes.map((box) => h("label", {}, box, box.value))),
      h("div", { class: "progress" }, this.button, this.bar, this.said), this.found,
    );
  }

  private async start(): Promise<void> {
    const run = ++this.run;
    this.verdicts.clear();
    fill(this.found);
    this.said.textContent = "";
    this.bar.hidden = false;
    this.bar.removeAttribute("value");
    this.button.textContent = "Stop";
    this.stop = () => {};
    const { config: _, ...question } = this.question();
    const python = await this.python();
    if (run !== this.run || !this.stop) return;
    const varied = this.boxes.filter((box) => box.checked).map((box) => box.value);
    this.stop = python.search(question, varied, (found) => {
      this.last = found;
      this.draw();
      if (found.done) void this.judge(python, run);
    }, (error) => {
      this.end("");
      fill(this.said, h("span", { class: "error" }, error.message));
    });
  }

  /** Asks for verdicts, the fastest plan first, until one is known to fit. */
  private async judge(python: Python, run: number): Promise<void> {
    this.end("");
    for (const { question } of this.last?.best ?? []) {
      const { verdict } = await python.call("held", question);
      if (run !== this.run) return;
      this.verdicts.set(JSON.stringify(question), verdict ?? "no limit");
      this.draw();
      if (verdict === "fits" || verdict === null) return;
    }
  }

  private end(why: string): void {
    this.stop?.();
    this.stop = null;
    this.bar.hidden = true;
    this.button.textContent = "Search";
    if (why) this.said.textContent = why + this.said.textContent;
  }

  private draw(): void {
    const found = this.last!;
    this.bar.max = found.n_plans || 1;
    this.bar.value = found.n_seen;
    const seen = found.done ? `${whole(found.n_plans)} plans` : `${whole(found.n_seen)} of ${whole(found.n_plans)} plans`;
    this.said.textContent = `${seen}: ${whole(found.n_within)} within the budget by what they allocate, ${whole(found.n_beyond)} beyond it, ${whole(found.n_refused)} refused.`;
    const names = Object.keys(found.best[0]?.values ?? {}).filter((name) => !["pp", "tp", "dp_replicate"].includes(name));
    const columns = ["", "mesh", ...names, "tokens", "a step", "tensors", "verdict"];
    fill(this.found, found.best.length > 0 && table("Plans found", columns, [0, 1, 2].map((i) => 2 + names.length + i), found.best.map((each) => this.row(each, names))));
  }

  private row(best: Best, names: string[]): (string | Node)[] {
    const verdict = this.verdicts.get(JSON.stringify(best.question));
    return [
      h("button", { type: "button", onclick: () => this.show(best.question) }, "Show"), best.mesh, ...names.map((name) => best.values[name]!),
      best.tokens_per_s_per_gpu === null ? "" : `${whole(best.tokens_per_s_per_gpu)}/s/GPU`,
      best.step_s === null ? "" : seconds(best.step_s), bytes(best.peak_bytes),
      verdict ? h("b", { "data-verdict": verdict as Verdict }, verdict) : "",
    ];
  }
}
