/** What `memplan.web.page` answers. */

/** A plan as texts by name. */
export type Question = Record<string, string>;

export type Field = { name: string; help: string; usual: string } & (
  | { kind: "flag" | "number" | "text" }
  | { kind: "choice"; choices: string[] }
  | { kind: "count"; least: number; most: number }
);

export type Form = {
  version: string;
  models: { name: string; parameters: number }[];
  gpus: { name: string; usable_bytes: number | null }[];
  kinds: string[];
  about: Field[];
  groups: { title: string; fields: Field[] }[];
  engines: Record<string, Field[]>;
  varied: string[];
  example: Question;
};

export type Verdict = "fits" | "fits, tight" | "cannot say" | "does not fit";

export type Collective = {
  kind: string;
  axis: string;
  what: string;
  calls: number;
  payload_bytes: number;
  wire_bytes: number;
  overlappable: boolean;
};

export type Stage = {
  stage: number;
  layers: string;
  when: string;
  bytes: Record<string, number>;
  total_bytes: number;
  time: Record<string, number> | null;
};

export type Answer = {
  model: { name: string; parameters: number; layers: number; code: string; implementation: string; implementations: string[] };
  plan: Question;
  mesh: string;
  batch: string;
  cluster: null | {
    name: string;
    n_gpus: number;
    usable_bytes: number | null;
    budget_bytes: number | null;
    text: string;
  };
  peak_bytes: number;
  worst: number;
  when: string;
  stages: Stage[];
  needs_replay: boolean;
  verdict: Verdict | null;
  step_s: number | null;
  time: Record<string, number> | null;
  time_missing: string[];
  time_label: string;
  tokens_per_s: number | null;
  tokens_per_s_band: [number, number] | null;
  mfu: number | null;
  collectives: Collective[];
  busiest: number;
  sent_bytes: number;
  host_bytes: number;
  notes: string[];
  trust: string;
  command: string | null;
  targets: string[];
};

export type Held = {
  verdict: Verdict | null;
  device_bytes: [number, number] | null;
  finding: string;
  reason: string;
};

/** What the page is built with: the form, and its first question with the answers. */
export type First = Form & { stops: Stops; answer: Answer; held: Held };

export type Row = { name: string; kind: string; shape: number[]; dtype: string; count: number; each_bytes: number; total_bytes: number };

export type Pass = [rank: number, stage: number, part: string, microBatch: number, start: number, stop: number];

/** The values at which a slider of each count stops. */
export type Stops = Record<string, number[]>;

/** How far a search is, and the best plans so far. */
export type Found = {
  n_plans: number;
  n_seen: number;
  n_within: number;
  n_beyond: number;
  n_refused: number;
  done: boolean;
  best: Best[];
};

export type Best = {
  question: Question;
  mesh: string;
  values: Record<string, string>;
  peak_bytes: number;
  step_s: number | null;
  tokens_per_s_per_gpu: number | null;
};

/** A phase of a step: the bytes of each kind at its points, in the order of `Form.kinds`. */
export type Phase = { name: "forward" | "backward" | "optimizer"; points: number[][] };

export type Calls = {
  keep(name: string, text: string): { model: string };
  stops(question: Question): Stops;
  answer(question: Question): Answer;
  held(question: Question): Held;
  others(question: Question): { disagreement: string[] };
  text(question: Question): { text: string };
  ledger(question: Question): { stage: number; when: string; rows: Row[] };
  schedule(question: Question): { passes: Pass[]; shown: number; n_micro_batches: number };
  step(question: Question): { phases: Phase[]; stage: number };
  export(question: Question, to: string): { text: string; file: string; notes: string[] };
  compared(a: Question, b: Question): { text: string };
};
