/** Python in a worker: loads Pyodide and memplan, then answers calls of `memplan.web.page`, one by one. */
import type { PyodideInterface } from "pyodide";
import archive from "../build/memplan.zip?url";

const START = `
import json, os
os.makedirs("/home/pyodide/model", exist_ok=True)
os.chdir("/home/pyodide/model")
from memplan.web.page import call

def answer(name, arguments):
    return json.dumps(call(name, *json.loads(arguments)))

answer
`;

type Answer = (name: string, args: string) => string;
let python: Promise<Answer> | undefined;

async function started(root: string): Promise<Answer> {
  const from = new URL("pyodide/", root).href;
  const zip = fetch(new URL(archive, import.meta.url)).then((found) => found.arrayBuffer());
  const { loadPyodide } = await import(/* @vite-ignore */ `${from}pyodide.mjs`);
  const pyodide: PyodideInterface = await loadPyodide({ indexURL: from });
  pyodide.unpackArchive(await zip, "zip", { extractDir: "/lib/python3.14/site-packages" });
  return pyodide.runPython(START) as Answer;
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
  const { id, name, args } = data;
  try {
    const answer = await python!;
    self.postMessage({ id, ...JSON.parse(answer(name, args)) });
  } catch (error) {
    const last = String(error).trim().split("\n").at(-1);
    self.postMessage({ id, error: `This is a fault of memplan's; please report it with this page's link. (${last})` });
  }
};
