/** The page's state in its address: one plan or two, by the names of the command line's flags. */
import type { Question } from "./types";

const BETWEEN = "|";

export function read(hash: string): Question[] {
  const parts = hash.replace(/^#/, "").split(BETWEEN).slice(0, 2);
  return parts.filter(Boolean).map((part) => {
    const found: Question = {};
    for (const [name, value] of new URLSearchParams(part)) found[name.replace(/^-+/, "").replaceAll("-", "_")] = value;
    return found;
  });
}

export function written(plans: Question[]): string {
  return `#${plans.map((plan) => new URLSearchParams(plan).toString()).join(BETWEEN)}`;
}
