import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

/**
 * The module that the model's thread starts with: `model-worker.js` beside the bundle; where this file itself runs
 * from source, a line that registers tsx and then imports the TypeScript file, because on Node 20 a thread takes
 * over neither the loader of its parent nor one given by `--import`.
 */
export function workerLocation(): URL {
  const here = import.meta.url;
  if (!new URL(here).pathname.endsWith(".ts")) return new URL("./model-worker.js", here);
  const tsx = pathToFileURL(createRequire(here).resolve("tsx/esm/api")).href;
  const worker = new URL("./model-worker.ts", here).href;
  const code = `import { register } from ${JSON.stringify(tsx)}; register(); await import(${JSON.stringify(worker)});`;
  return new URL(`data:text/javascript,${encodeURIComponent(code)}`);
}
