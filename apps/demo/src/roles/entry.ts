import { fileURLToPath } from "node:url";

/** Arguments for `process.execPath` that run this program anew: from source by tsx, else the bundle. */
export function entryArguments(): string[] {
  const here = import.meta.url;
  if (here.endsWith(".ts")) return ["--import", "tsx", fileURLToPath(new URL("../main.ts", here))];
  return [fileURLToPath(new URL("./main.js", here))];
}
