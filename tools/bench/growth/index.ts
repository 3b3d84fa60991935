// How costs grow with sizes. Each group is measured in a process of its own: its heap and its
// compiled code have nothing of the others.
import { writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { linePeer } from "../../clients/python.js";
import { plot } from "../plot.js";
import { alone, type Row } from "../report.js";
import type { Run } from "../run.js";
import type { Measured } from "./run-group.js";

const RUN_GROUP = fileURLToPath(new URL("./run-group.ts", import.meta.url));
const GROUPS = ["scheduler", "worker", "plan", "nixl", "proxy", "fleet"];

export const growth = (run: Run): Promise<readonly Row[]> =>
  run.parts(Object.fromEntries(GROUPS.map((name) => [name, () => measureGroup(name, run)])), run);

async function measureGroup(name: string, run: Run): Promise<readonly Row[]> {
  const short = run.short ? ["--short"] : [];
  const args = ["--expose-gc", "--import", "tsx", RUN_GROUP, name, ...short];
  const group = linePeer(process.execPath, args);
  const { title, missing, curves, rows } = await group.ask<Measured>({});
  await group.close();
  if (missing !== undefined) return [alone(name, missing, "-")];
  const exponents = rows.map(({ ratio = Number.NaN }) => ` (${ratio.toFixed(2)})`);
  const named = curves.map((curve, at) => ({ ...curve, name: curve.name + exponents[at] }));
  const file = new URL(`../../../docs/bench/growth-${name}.svg`, import.meta.url);
  if (run.record) await writeFile(file, plot(title, named));
  return rows;
}
