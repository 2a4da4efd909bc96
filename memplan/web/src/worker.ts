/** Python in a worker: loads Pyodide and memplan, then answers calls of `memplan.web.page`, one by one. */
import type { PyodideInterface } from "pyodide";
import archive from "../build/memplan.zip?url";

const START = `
import json, os
os.makedirs("/home/pyodide/model", exist_ok=True)
os.chdir("/home/pyodide/model")
from memplan.web.page import call, stream

def answer(name, arguments):
    return json.dumps(call(name, *json.loads(arguments)))

def search(arguments):
    return map(json.dumps, stream(*json.loads(arguments)))

answer, search
`;

type Answers = [answer: (name: string, args: string) => string, search: (args: string) => Iterator<string, undefined> & { destroy(): void }];
let python: Promise<Answers> | undefined;
const stopped = new Set<number>();

async function started(root: string): Promise<Answers> {
  const from = new URL("pyodide/", root).href;
  const zip = fetch(new URL(archive, import.meta.url)).then((found) => found.arrayBuffer());
  const { loadPyodide } = await import(/* @vite-ignore */ `${from}pyodide.mjs`);
  const pyodide: PyodideInterface = await loadPyodide({ indexURL: from });
  pyodide.unpackArchive(await zip, "zip", { extractDir: "/lib/python3.14/site-packages" });
  return (pyodide.runPython(START) as { toJs(): Answers }).toJs();
}

self.onmessage = async ({ data }: MessageEvent) => {
  if ("root" in data) {
    python = started(data.root);
    try {
      await python;
      self.postMessage({ ready: true });
    } catch (error) {
      self.postMessage({ failed: String(error) });
    }
    return;
  }
  const { id, name, args, stop } = data;
  if (stop) return void stopped.add(stop);
  try {
    const [answer, search] = await python!;
    if (name === "search") await streamed(id, search(args));
    else self.postMessage({ id, ...JSON.parse(answer(name, args)) });
  } catch (error) {
    const last = String(error).trim().split("\n").at(-1);
    self.postMessage({ id, error: `This is a fault of memplan's; please report it with this page's link. (${last})` });
  }
};

/** Posts each answer, and lets other calls in between, until all are there or they are no longer wanted. */
async function streamed(id: number, answers: ReturnType<Answers[1]>): Promise<void> {
  while (!stopped.delete(id)) {
    const { value, done } = answers.next();
    if (done) break;
    self.postMessage({ id, ...JSON.parse(value) });
    await new Promise((resolve) => setTimeout(resolve));
  }
  answers.destroy();
}
