/** Python instances in workers, and calls of `memplan.web.page` on them. */
import type { Calls, Found, Question } from "./types";

export class Refused extends Error {}

type Waiting = { resolve: (value: unknown) => void; reject: (error: Error) => void };

export class Python {
  readonly ready: Promise<void>;
  isReady = false;
  private worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module" });
  private waiting = new Map<number, Waiting>();
  private searches = new Map<number, Waiting>();
  private queued = new Map<string, () => void>();
  private n = 0;

  constructor() {
    this.ready = new Promise((resolve, reject) => {
      this.worker.onmessage = ({ data }) => {
        if (data.ready) {
          this.isReady = true;
          resolve();
        }
        else if (data.failed) reject(new Error(data.failed));
        else this.settle(data);
      };
      this.worker.onerror = (event) => reject(new Error(event.message));
    });
    this.worker.postMessage({ root: document.baseURI });
  }

  /** The answer to a call; calls are answered in order. */
  call<K extends keyof Calls>(name: K, ...args: Parameters<Calls[K]>): Promise<ReturnType<Calls[K]>> {
    const id = ++this.n;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve: resolve as Waiting["resolve"], reject });
      this.worker.postMessage({ id, name, args: JSON.stringify(args) });
    });
  }

  /** As `call`, but a newer call for the same `slot` replaces one that has not begun, which then never settles. */
  latest<K extends keyof Calls>(slot: string, name: K, ...args: Parameters<Calls[K]>): Promise<ReturnType<Calls[K]>> {
    return new Promise((resolve, reject) => {
      this.queued.set(slot, () => this.call(name, ...args).then(resolve, reject));
      this.next();
    });
  }

  /** Searches for plans: `told` gets what is found as it is found. Returns what stops the search. */
  search(question: Question, varied: string[], told: (found: Found) => void, failed: (error: Error) => void): () => void {
    const id = ++this.n;
    this.searches.set(id, { resolve: told as Waiting["resolve"], reject: failed });
    this.worker.postMessage({ id, name: "search", args: JSON.stringify([question, varied]) });
    return () => {
      this.searches.delete(id);
      this.worker.postMessage({ stop: id });
    };
  }

  private next(): void {
    if (this.waiting.size) return;
    const [first] = this.queued;
    if (!first) return;
    this.queued.delete(first[0]);
    first[1]();
  }

  private settle({ id, value, error }: { id: number; value?: unknown; error?: string }): void {
    const waiting = this.waiting.get(id) ?? this.searches.get(id);
    this.waiting.delete(id);
    if (error === undefined) waiting?.resolve(value);
    else waiting?.reject(new Refused(error));
    this.next();
  }
}
