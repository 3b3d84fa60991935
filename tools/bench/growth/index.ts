// Measures how costs grow with sizes: npm run bench -- growth [--only GROUP,…] [--short] [--json]
// [--record]
import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { alone, type Row } from "../report.js";
import { publish, showCost, showSize } from "./document.js";
import { TOLERANCE } from "./exponent.js";
import { GROUPS } from "./groups.js";
import type { Measured, MeasuredGroup } from "./quantity.js";

const RUN_GROUP = fileURLToPath(new URL("./run-group.ts", import.meta.url));

export async function growth(only: readonly string[] | undefined): Promise<readonly Row[]> {
  const names = only ?? Object.keys(GROUPS);
  const unknown = names.filter((name) => !(name in GROUPS));
  if (unknown.length > 0)
    throw new Error(
      `no group is called ${unknown.join(", ")}; the groups are ${Object.keys(GROUPS).join(", ")}`,
    );
  const short = process.argv.includes("--short");
  const rows: Row[] = [];
  for (const name of names) {
    const group = await measureGroup(name, short);
    if (!short && group.missing === undefined && process.argv.includes("--record"))
      await publish(group);
    rows.push(...rowsOf(group));
  }
  return rows;
}

/**
 * Each group has a process of its own: its heap and its compiled code have nothing of the others.
 */
function measureGroup(name: string, short: boolean): Promise<MeasuredGroup> {
  process.stderr.write(`${name}\n`);
  const args = ["--expose-gc", "--import", "tsx", RUN_GROUP, name, ...(short ? ["--short"] : [])];
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, args, { stdio: ["ignore", "pipe", "inherit"] });
    let text = "";
    child.stdout.on("data", (chunk: Buffer) => {
      text += chunk.toString();
    });
    child.once("error", reject);
    child.once("close", (code, signal) => {
      if (code === 0) resolve(JSON.parse(text.trimEnd().split("\n").at(-1) ?? "") as MeasuredGroup);
      else reject(new Error(`the measurement of ${name} ended with ${signal ?? code}`));
    });
  });
}

function rowsOf({ name, missing, quantities }: MeasuredGroup): Row[] {
  if (missing !== undefined) return [alone(name, missing, "-")];
  return quantities.map((quantity) => rowOf(name, quantity));
}

function rowOf(
  group: string,
  { name, sizeOf, sizes, costs, unit, growth, exponent, most, met }: Measured,
): Row {
  return {
    what: `${group}: ${name}; ${sizes.map(showSize).join(", ")} ${sizeOf}: exponent`,
    ours: `${costs.map(showCost).join(", ")} ${unit}`,
    theirs: "-",
    ratio: growth,
    wanted: `<= ${exponent + TOLERANCE}${most === undefined ? "" : `, <= ${most} ${unit}`}`,
    met,
  };
}
