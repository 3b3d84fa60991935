// TTFT of pull and push on links that this machine lacks: the proxy, the connectors and the engines' schedulers as they are, over the embedded transport,
// on a virtual clock; and the same simulation against real processes with this machine's parameters.
import { mkdir, writeFile } from "node:fs/promises";
import { nameOf } from "../push-vs-pull/workload.js";
import type { Row } from "../report.js";
import { document, gain } from "./document.js";
import { sweep } from "./sweep.js";
import { type Compared, validate } from "./validate.js";

const DOCS = new URL("../../docs/bench/", import.meta.url);

/** `only`: `sweep` or `validate`. Without it both run, and docs/bench is written. Neither needs NIXL or a quiet machine. */
export async function pushVsPullLinks(only: readonly string[] | undefined): Promise<readonly Row[]> {
  const swept = only?.includes("sweep") === false ? [] : await sweep();
  const compared = only?.includes("validate") === false ? [] : await validate();
  if (only === undefined && compared.length > 0 && !process.argv.includes("--no-docs")) {
    await mkdir(DOCS, { recursive: true });
    await writeFile(new URL("push-vs-pull-links.md", DOCS), document(swept, compared));
  }
  const rows = swept.map((each): Row => {
    const { linkGbits, hopMs, hitsAt, point, ttftMs } = each;
    return {
      what: `${linkGbits} Gb/s, ${hopMs} ms: ${nameOf(point)} at ${hitsAt}: pull / push, pull / layer-wise`,
      ours: `${ttftMs.push.toFixed(2)}, ${ttftMs["push, layer-wise"].toFixed(2)} ms`,
      theirs: `${ttftMs.pull.toFixed(2)} ms`,
      ratio: Math.max(gain(each, "push"), gain(each, "push, layer-wise")),
      wanted: "reported",
      met: undefined,
    };
  });
  return [...rows, ...validationRows(compared)];
}

function validationRows(compared: readonly Compared[]): readonly Row[] {
  return compared.map(({ way, point, realMs, virtualMs }) => ({
    what: `${way}, ${nameOf(point)}: virtual / real`,
    ours: `${virtualMs.toFixed(1)} ms`,
    theirs: `${realMs.toFixed(1)} ms`,
    ratio: virtualMs / realMs,
    wanted: "0.85 to 1.15",
    met: Math.abs(virtualMs / realMs - 1) <= 0.15,
  }));
}
