import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const PYODIDE = ["pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"];
const HERE = new URL(".", import.meta.url);

/** Emits Pyodide's own files beside the page's, and a service worker that keeps all of them. */
function shipped(): Plugin {
  return {
    name: "shipped",
    apply: "build",
    generateBundle(_, bundle) {
      for (const name of PYODIDE) {
        const source = readFileSync(new URL(`node_modules/pyodide/${name}`, HERE));
        this.emitFile({ type: "asset", fileName: `pyodide/${name}`, source });
      }
      const kept = ["./", ...Object.keys(bundle).filter((name) => name !== "index.html"), ...PYODIDE.map((n) => `pyodide/${n}`)];
      const hash = createHash("sha256");
      for (const each of Object.values(bundle)) hash.update(each.type === "chunk" ? each.code : each.source);
      hash.update(readFileSync(new URL("index.html", HERE)));
      hash.update(readFileSync(new URL("node_modules/pyodide/package.json", HERE)));
      const code = readFileSync(new URL("src/offline.js", HERE), "utf8")
        .replace("__VERSION__", hash.digest("hex").slice(0, 16))
        .replace('["__KEPT__"]', JSON.stringify([...new Set(kept)]));
      this.emitFile({ type: "asset", fileName: "offline.js", source: code });
    },
  };
}

export default defineConfig({
  base: "./",
  build: { target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false }, chunkSizeWarningLimit: 400,
    rolldownOptions: { output: { codeSplitting: { groups: [{ name: "plot", test: /node_modules/ }] } } },
  },
  worker: { format: "es" },
  plugins: [shipped()],
});
