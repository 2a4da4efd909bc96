/** The form of a plan: a row for each field, made from the package's own descriptions. */
import { h, bytes, short } from "./dom";
import type { Answer, Field, First, Form as Described, Question, Stops } from "./types";

const OPEN = new Set(matchMedia("(max-width: 900px)").matches ? ["Mesh"] : ["Mesh", "Batch", "Memory saving"]);
const POWERS = Array.from({ length: 15 }, (_, i) => 2 ** i);
const NO_GPU = "";

/** A row shows the value that was asked for, and beside it what the plan has if none was. */
type Row = { element: HTMLElement; show(asked: string | undefined, answer: Answer | null, stops: number[]): void };
type Told = (name: string, value: string, settled: boolean) => void;

export class Form {
  private rows = new Map<string, Row>();
  private options = h("details", { class: "group" });
  private engine = "";
  private question: Question = {};
  private answer: Answer | null = null;
  private stops: Stops;

  constructor(
    private described: First,
    root: HTMLElement,
    private changed: (question: Question, settled: boolean) => void,
    opened: (file: File) => void,
  ) {
    this.stops = described.stops;
    const help = h("p", { class: "help", "aria-hidden": "true" }, "What a field means stands here when you point at it.");
    const explain = ({ target }: Event) => {
      const label = (target as Element).closest(".row")?.querySelector("label");
      if (label) help.replaceChildren(h("b", {}, label.querySelector("b")?.textContent), ` ${label.querySelector("small")?.textContent ?? ""}`);
    };
    root.append(
      h("div", { class: "fields", onpointerover: explain, onfocusin: explain },
        this.job(opened),
        ...described.groups.map(({ title, fields }) => this.group(title, fields)),
        this.options,
        h("div", { class: "reset" }, h("button", { type: "reset" }, "Start over"))),
      help,
    );
    root.addEventListener("submit", (event) => event.preventDefault());
    root.addEventListener("reset", (event) => {
      event.preventDefault();
      const { model, cluster } = this.question;
      this.changed({ ...(model && { model }), ...(cluster && { cluster }) }, true);
    });
  }

  /** Shows a plan; `answer` has the values that were left out. */
  show(question: Question, answer: Answer | null): void {
    this.question = question;
    this.showOptions(question.engine ?? "torch");
    this.answer = answer;
    for (const [name, row] of this.rows) row.show(question[name], answer, this.stops[name] ?? []);
  }

  /** Moves the stops of the sliders. */
  stop(stops: Stops): void {
    this.stops = stops;
    this.show(this.question, this.answer);
  }

  private told: Told = (name, value, settled) => {
    const { [name]: _, ...rest } = this.question;
    this.question = value === "" ? rest : { ...this.question, [name]: value };
    this.changed(this.question, settled);
  };

  private job(opened: (file: File) => void): HTMLElement {
    const model = this.model(opened);
    const cluster = clusterRow(this.described, this.told);
    this.rows.set("model", model);
    this.rows.set("cluster", cluster);
    const more = this.described.about.map((field) => this.row(field));
    return h("section", { class: "job" }, model.element, cluster.element, h("details", { class: "group" }, h("summary", {}, "More of model and cluster"), ...more));
  }

  private model(opened: (file: File) => void): Row {
    const names = this.described.models.map(({ name, parameters }) => h("option", { value: name }, `${short(parameters)} parameters`));
    const known = new Set(this.described.models.map(({ name }) => name));
    const input: HTMLInputElement = h("input", {
      id: "model", list: "models", autocomplete: "off", spellcheck: "false",
      oninput: () => known.has(input.value) && this.told("model", input.value, true),
      onchange: () => this.told("model", input.value.trim(), true),
      onfocus: () => input.select(),
    });
    const file: HTMLInputElement = h("input", { type: "file", accept: ".json,application/json", id: "file", onchange: () => file.files?.[0] && opened(file.files[0]) });
    const size = h("small", {});
    return {
      element: h("div", { class: "row" }, h("label", { for: "model" }, h("b", {}, "model"), size), input, h("datalist", { id: "models" }, ...names),
        h("label", { class: "file", for: "file" }, file, "or open a config.json or a saved trace")),
      show(asked, answer) {
        if (document.activeElement !== input || !asked) input.value = asked ?? "";
        else if (known.has(asked)) input.value = asked;
        size.textContent = answer ? `${short(answer.model.parameters)} parameters, ${answer.model.layers} layers` : "";
      },
    };
  }

  private group(title: string, fields: Field[]): HTMLElement {
    return h("details", { class: "group", open: OPEN.has(title) }, h("summary", {}, title), ...fields.map((field) => this.row(field)));
  }

  private row(field: Field): HTMLElement {
    const row = fieldRow(field, this.told);
    this.rows.set(field.name, row);
    return row.element;
  }

  private showOptions(engine: string): void {
    if (engine === this.engine) return;
    for (const { name } of this.described.engines[this.engine] ?? []) this.rows.delete(name);
    this.engine = engine;
    const fields = this.described.engines[engine] ?? [];
    this.options.hidden = !fields.length;
    this.options.replaceChildren(h("summary", {}, `Options of ${engine}`), ...fields.map((field) => this.row(field)));
  }
}

function head(name: string, help: string, id = name): HTMLLabelElement {
  return h("label", { for: id, title: help }, h("b", {}, name), h("small", { id: `${id}-help` }, help));
}

function fieldRow(field: Field, told: Told): Row {
  const { name, help, usual } = field;
  const described = { id: name, name, "aria-describedby": `${name}-help` };
  const tell = (value: string, settled = true) => told(name, value === usual ? "" : value, settled);
  if (field.kind === "flag") {
    const box: HTMLInputElement = h("input", { ...described, type: "checkbox", onchange: () => tell(String(box.checked)) });
    return {
      element: h("div", { class: "row flag" }, box, head(name, help)),
      show: (asked, answer) => void (box.checked = (asked ?? answer?.plan[name] ?? usual) === "true"),
    };
  }
  if (field.kind === "choice") {
    const select: HTMLSelectElement = h("select", { ...described, onchange: () => tell(select.value) });
    const choices = usual ? field.choices : ["", ...field.choices];
    return {
      element: h("div", { class: "row choice" }, head(name, help), select),
      show: (asked) => chosen(select, asked ?? usual, choices),
    };
  }
  const input: HTMLInputElement = h("input", {
    ...described, inputmode: field.kind === "count" ? "numeric" : field.kind === "number" ? "decimal" : null, autocomplete: "off",
    [field.kind === "count" ? "oninput" : "onchange"]: () => told(name, input.value.trim(), true),
  });
  if (field.kind !== "count")
    return {
      element: h("div", { class: "row choice" }, head(name, help), input),
      show(asked, answer) {
        if (document.activeElement !== input) input.value = asked ?? "";
        if (name === "implementation") input.placeholder = answer?.model.implementation ?? "";
      },
    };
  const slider = slides(name, (n, settled) => tell(String(n), settled));
  return {
    element: h("div", { class: "row count" }, head(name, help), input, slider.element),
    show(asked, answer, stops) {
      const taken = answer?.plan[name] ?? "";
      if (document.activeElement !== input || asked === undefined) input.value = asked ?? "";
      input.placeholder = taken || usual;
      slider.show(Number(asked ?? (taken || usual)), stops);
    },
  };
}

/** A slider over given numbers. */
function slides(label: string, moved: (n: number, settled: boolean) => void) {
  let stops: number[] = [];
  const send = (settled: boolean) => moved(stops[Number(element.value)]!, settled);
  const element: HTMLInputElement = h("input", { type: "range", min: 0, "aria-label": `${label}, slider`, oninput: () => send(false), onchange: () => send(true) });
  const show = (n: number, given: number[]) => {
    if (given.length) stops = given.includes(n) || !(n > 0) ? given : [...given, n].sort((a, b) => a - b);
    element.max = String(Math.max(0, stops.length - 1));
    element.disabled = stops.length < 2;
    element.value = String(Math.max(0, stops.indexOf(n)));
    element.setAttribute("aria-valuetext", String(n || ""));
    element.style.setProperty("--filled", `${(100 * Number(element.value)) / (Number(element.max) || 1)}%`);
  };
  return { element, show };
}

function chosen(select: HTMLSelectElement, value: string, choices: string[]): void {
  const shown = choices.includes(value) ? choices : [...choices, value];
  if (shown.join() !== [...select.options].map((each) => each.value).join())
    select.replaceChildren(...shown.map((each) => h("option", { value: each }, each || "(left out)")));
  select.value = value;
}

/** How many GPUs of which kind: `64xh100-sxm`. */
function clusterRow({ gpus }: Described, told: Told): Row {
  const tell = (settled = true) => told("cluster", kind.value === NO_GPU ? "" : `${count.value || 1}x${kind.value}`, settled);
  const count: HTMLInputElement = h("input", { id: "gpus", inputmode: "numeric", "aria-label": "number of GPUs", oninput: () => tell() });
  const options = gpus.map(({ name, usable_bytes }) => h("option", { value: name }, usable_bytes ? `${name} · ${bytes(usable_bytes, 0)}` : name));
  const kind: HTMLSelectElement = h("select", { id: "gpu", "aria-label": "kind of GPU", onchange: () => tell() }, h("option", { value: NO_GPU }, "no GPU named"), ...options);
  const slider = slides("number of GPUs", (n, settled) => {
    count.value = String(n);
    tell(settled);
  });
  const text = h("small", {});
  return {
    element: h("div", { class: "row cluster" }, h("label", { for: "gpus" }, h("b", {}, "cluster"), text), count, kind, slider.element),
    show(asked, answer) {
      const [, n = "", name = asked ?? ""] = /^\s*(\d+)\s*x\s*(.+)$/i.exec(answer?.cluster?.name ?? asked ?? "") ?? [];
      if (document.activeElement !== count) count.value = n;
      if (![...kind.options].some((each) => each.value === name)) kind.append(h("option", { value: name }, name));
      kind.value = name;
      slider.show(Number(n), POWERS);
      text.textContent = answer?.cluster?.text ?? "";
    },
  };
}
