// TTFT of pull and push. `processes`: through the whole demo on this machine, in turn in one run.
// `links`: on links that this machine lacks: the proxy, the connectors and the engines' schedulers
// as they are, over the embedded transport, on a virtual clock. `validate`: that simulation against
// the processes.
import { mkdir, writeFile } from "node:fs/promises";
import type { Row } from "../report.js";
import { document, linkRows } from "./links/document.js";
import { sweep } from "./links/sweep.js";
import { validate } from "./links/validate.js";
import { measureProcesses } from "./processes/measure.js";

const DOCS = new URL("../../../docs/bench/", import.meta.url);

/**
 * Runs the parts `processes`, `links` and `validate`, or those of `only`. With --record writes
 * docs/bench/push-vs-pull.md, and push-vs-pull-links.md from the last two. Only `processes` needs
 * NIXL and a quiet machine.
 */
export async function pushVsPull(
  only: readonly string[] = ["processes", "links", "validate"],
): Promise<readonly Row[]> {
  const publish = async (name: string, text: string) => {
    if (!process.argv.includes("--record")) return;
    await mkdir(DOCS, { recursive: true });
    await writeFile(new URL(name, DOCS), text);
  };
  const rows = only.includes("processes") ? await measureProcesses(publish) : [];
  const swept = only.includes("links") ? await sweep() : [];
  const compared = only.includes("validate") ? await validate() : [];
  if (swept.length > 0 && compared.length > 0)
    await publish("push-vs-pull-links.md", document(swept, compared));
  return [...rows, ...linkRows(swept, compared)];
}
