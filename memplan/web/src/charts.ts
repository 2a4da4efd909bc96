/** Charts of a plan. Colors are those of memplan's own charts: Okabe and Ito's, in `style.css`. */
import { areaY, axisX, axisY, barX, plot, rect, ruleX, ruleY, text } from "@observablehq/plot";
import { bytes, h, seconds } from "./dom";
import type { Answer, Pass, Phase } from "./types";

/** Kinds of bytes from the left: those that stay from step to step first. */
export const KINDS = { weights: "weights", optimizer: "optimizer state", grads: "gradients", activations: "activations", temporaries: "temporaries" };
const PARTS = { forward: "forward", backward: "backward", "backward-input": "backward, inputs", "backward-weight": "backward, weights" };
const FONT = { fontSize: "12px", background: "none", overflow: "visible" };
const TIP = { lineHeight: 1.35, stroke: "var(--line)" };
const GIB = 1024 ** 3;

const colors = (names: Record<string, string>, prefix: string) => ({
  domain: Object.keys(names),
  range: Object.keys(names).map((name) => `var(--${prefix}-${name})`),
});

/** A chart as one picture for screen readers, whose description says its figures. */
function picture(svg: Element): Element {
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${svg.getAttribute("aria-label")}: ${svg.getAttribute("aria-description")}`);
  svg.removeAttribute("aria-description");
  svg.querySelectorAll("g[aria-label]").forEach((mark) => mark.removeAttribute("aria-label"));
  return svg;
}

/** A legend of words beside their colors; figures stand behind the words if there are any. */
export function legend(prefix: string, entries: [name: string, label: string, figure?: string][]): HTMLElement {
  return h("ul", { class: "legend" }, ...entries.map(([name, label, figure]) =>
    h("li", {}, h("i", { style: `background:var(--${prefix}-${name})` }), label, figure ? h("b", {}, figure) : null)));
}

/** What a GPU of each stage holds at its worst instant, by kind, beside what it has. */
export function stages(answer: Answer, width: number): HTMLElement {
  const { stages, cluster } = answer;
  const rows = stages.flatMap(({ stage, bytes: held, layers, when, total_bytes }) =>
    Object.keys(KINDS).map((kind) => ({ stage, kind, gib: (held[kind] ?? 0) / GIB, layers, when, total_bytes })));
  const usable = cluster?.usable_bytes ?? null;
  const budget = cluster?.budget_bytes ?? null;
  const most = Math.max(...stages.map((each) => each.total_bytes), usable ?? 0) / GIB;
  const each = stages.length > 16 ? 14 : stages.length > 1 ? 26 : 44;
  const svg = plot({
    width, height: stages.length * each + 62, marginLeft: 46, marginRight: 16, marginTop: 22, marginBottom: 40, style: FONT,
    x: { domain: [0, most * 1.02], label: "GiB on a GPU", nice: false }, y: { label: null, padding: 0.22 }, color: colors(KINDS, "kind"),
    marks: [
      axisX({ ticks: width < 500 ? 5 : 9, tickSize: 3 }),
      axisY({ tickSize: 0, tickFormat: (n: number) => (stages.length > 24 && n % 4 ? "" : stages.length > 1 ? `stage ${n}` : "") }),
      barX(rows, { x: "gib", y: "stage", fill: "kind", order: Object.keys(KINDS), insetRight: 0.6, tip: TIP,
        title: (d) => `stage ${d.stage}, blocks ${d.layers}\n${KINDS[d.kind as keyof typeof KINDS]}: ${bytes(d.gib * GIB)}\nof ${bytes(d.total_bytes)}, in ${d.when}` }),
      budget === null ? null : ruleX([budget / GIB], { stroke: "currentColor", strokeDasharray: "4 3" }),
      usable === null ? null : ruleX([usable / GIB], { stroke: "currentColor" }),
      usable === null ? null : text([usable / GIB], { x: (x) => x, frameAnchor: "top", textAnchor: usable / GIB > most / 2 ? "end" : "start", dy: -14, text: () => `${bytes(usable, 1)} usable; dashed: less the margin`, fill: "currentColor" }),
    ],
    ariaLabel: "Bytes on a GPU of each stage",
    ariaDescription: stages.map((each) => `stage ${each.stage}: ${bytes(each.total_bytes)}`).join(", "),
  });
  return h("figure", {}, legend("kind", Object.entries(KINDS).map(([kind, label]) => [kind, label, bytes(stages[answer.stages.findIndex((s) => s.stage === answer.worst)]?.bytes[kind] ?? 0)])), picture(svg));
}

/** The bytes of the stage that holds most, over a step in the order of allocations and frees. */
export function timeline(phases: Phase[], kinds: string[], answer: Answer, width: number): HTMLElement {
  const points = phases.flatMap(({ points }) => points);
  const rows = [...points, points.at(-1)!].flatMap((point, x) => kinds.map((kind, i) => ({ x, kind, gib: point[i]! / GIB })));
  const starts = phases.map((_, i) => phases.slice(0, i).reduce((sum, { points }) => sum + points.length, 0));
  const bands = phases.map(({ name, points }, i) => ({ name, x1: starts[i]!, x2: starts[i]! + points.length }));
  const totals = points.map((point) => point.reduce((sum, n) => sum + n, 0));
  const peak = Math.max(...totals);
  const usable = answer.cluster?.usable_bytes ?? null;
  const top = usable !== null && usable < 2 * peak ? Math.max(usable, peak) : peak;
  const named = bands.filter(({ x1, x2 }) => ((x2 - x1) / points.length) * width > 62);
  const at = totals.indexOf(peak);
  const svg = plot({
    width, height: 250, marginLeft: 46, marginRight: 16, marginTop: 22, marginBottom: 26, style: FONT,
    x: { axis: null, domain: [0, points.length] }, y: { label: "GiB", domain: [0, (top * 1.06) / GIB] }, color: colors(KINDS, "kind"),
    marks: [
      rect(bands.filter(({ name }) => name !== "forward"), { x1: "x1", x2: "x2", y1: 0, y2: (top * 1.06) / GIB, fill: "currentColor", fillOpacity: (d) => (d.name === "backward" ? 0.06 : 0.14) }),
      axisY({ ticks: 5, tickSize: 3 }),
      areaY(rows, { x: "x", y: "gib", fill: "kind", order: Object.keys(KINDS), curve: "step-after" }),
      usable !== null && usable < 2 * peak ? ruleY([usable / GIB], { stroke: "currentColor" }) : null,
      text(named, { x: (d) => (d.x1 + d.x2) / 2, text: "name", frameAnchor: "bottom", dy: 16, fill: "currentColor" }),
      text([{ x: at, y: peak / GIB }], { x: "x", y: "y", text: () => `▾ peak ${bytes(peak)}`, lineAnchor: "bottom", textAnchor: at > points.length / 2 ? "end" : "start", dx: at > points.length / 2 ? 5 : -5, fontWeight: "600", fill: "currentColor", stroke: "var(--card)", strokeWidth: 4 }),
    ],
    ariaLabel: "Bytes held over a step",
    ariaDescription: `at most ${bytes(peak)}, in ${answer.when}`,
  });
  return h("figure", {}, picture(svg));
}

/** The parts of a step of each stage, to the scale of the longest step that is shown. */
export function step(answer: Answer, longest_s: number, width: number): HTMLElement {
  const names = Object.keys(answer.time ?? {});
  const name = (part: string) => part.replace(/_s$/, "");
  const rows = answer.stages.flatMap(({ stage, time }) => names.map((part) => ({ stage, part: name(part), s: time?.[part] ?? 0 })));
  const many = answer.stages.length;
  const each = many > 16 ? 12 : many > 1 ? 20 : 36;
  const svg = plot({
    width, height: many * each + 46, marginLeft: 46, marginRight: 16, marginTop: 6, marginBottom: 40, style: FONT,
    x: { label: "seconds of a step", domain: [0, Math.max(longest_s, answer.step_s ?? 0)] }, y: { label: null, padding: 0.22 }, color: { domain: names.map(name), range: names.map((part) => `var(--part-${name(part)}, var(--part-other))`) },
    marks: [
      axisX({ ticks: width < 500 ? 5 : 9, tickSize: 3 }),
      axisY({ tickSize: 0, tickFormat: (n: number) => (many > 24 && n % 4 ? "" : many > 1 ? `stage ${n}` : "") }),
      barX(rows, { x: "s", y: "stage", fill: "part", order: names.map(name), insetRight: 0.6, tip: TIP, title: (d) => `stage ${d.stage}\n${d.part}: ${seconds(d.s)}` }),
    ],
    ariaLabel: "The parts of a step's time on each stage",
    ariaDescription: Object.entries(answer.time ?? {}).map(([part, s]) => `${name(part)}: ${seconds(s)}`).join(", "),
  });
  const parts = Object.entries(answer.time ?? {}).filter(([, s]) => s > 0);
  return h("figure", {}, legend("part", parts.map(([part, s]) => [name(part), name(part), seconds(s)])), picture(svg));
}

/** Every pass of every pipeline rank. */
export function schedule(passes: Pass[], width: number): HTMLElement {
  const rows = passes.map(([rank, stage, part, micro, start, stop]) => ({ rank, stage, part, micro, start, stop }));
  const ranks = Math.max(...rows.map(({ rank }) => rank)) + 1;
  const shown = Object.entries(PARTS).filter(([part]) => rows.some((row) => row.part === part));
  const each = ranks > 16 ? 12 : 22;
  const wide = (width - 70) / (rows.length / ranks) > 15;
  const svg = plot({
    width, height: ranks * each + 46, marginLeft: 46, marginRight: 16, marginTop: 6, marginBottom: 40, style: FONT,
    x: { label: "seconds" }, y: { label: null, domain: [ranks, 0], type: "linear" }, color: colors(PARTS, "pass"),
    marks: [
      axisX({ ticks: width < 500 ? 5 : 9, tickSize: 3 }),
      axisY({ ticks: [], label: null }),
      text(Array.from({ length: ranks }, (_, i) => i).filter((i) => ranks <= 24 || i % 4 === 0), { y: (i) => i + 0.5, frameAnchor: "left", textAnchor: "end", dx: -6, text: (i) => `stage ${i}`, fill: "currentColor" }),
      rect(rows, { x1: "start", x2: "stop", y1: (d) => d.rank + 0.08, y2: (d) => d.rank + 0.92, fill: "part", insetRight: wide ? 0.8 : 0.3, tip: TIP,
        title: (d) => `rank ${d.rank}, stage ${d.stage}\n${PARTS[d.part as keyof typeof PARTS]} of micro-batch ${d.micro}\n${seconds(d.start)} to ${seconds(d.stop)}` }),
      wide ? text(rows, { x: (d) => (d.start + d.stop) / 2, y: (d) => d.rank + 0.5, text: "micro", fontSize: 10, fill: (d) => (d.part === "forward" ? "var(--on-forward)" : "var(--on-backward)") }) : null,
    ],
    ariaLabel: "The pipeline's schedule",
    ariaDescription: `${ranks} pipeline ranks, ${rows.length} passes in ${seconds(Math.max(...rows.map(({ stop }) => stop)))}`,
  });
  return h("figure", {}, legend("pass", shown), picture(svg));
}
